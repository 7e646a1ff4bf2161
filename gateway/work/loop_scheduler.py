"""Divides the event loop between API keys: text, JSON and events are Python work on it, 15-40 us per token.

    scheduler = loop_scheduler.of(key)
    scheduler.submit(work)      # runs now if the key has time left in its slice, else in a later round

Algorithm: deficit round robin over measured time. Each round gives a key one time slice; overrun is subtracted from its
next slices. Between two rounds the loop handles sockets and store messages, so a key waits at most one round of the
other keys. A key that is alone gets all the time. Only callbacks are queued, one per answer: tokens stay where they
arrived, and overflow stays in the journal (gateway/store/inbox.py).
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

SLICE_SECONDS = 0.0005  # per key and round: 30 tokens, or 12 with 20 logprobs; a token takes several rounds
ROUND_SECONDS = 0.003  # of all keys together, however many wait

Work: TypeAlias = Callable[[], bool]  # does a part, checks is_over, returns whether more is left; must not raise


class LoopScheduler:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.num_rounds = 0
        self._keys: dict[Hashable, KeyScheduler] = {}  # at most as many as the key file has keys
        self._ring = deque[KeyScheduler]()  # keys with queued work, the next one first
        self._is_round_scheduled = False

    def of(self, key: Hashable) -> "KeyScheduler":
        """Return the scheduler of a key; the same object for each call."""
        if key not in self._keys:
            self._keys[key] = KeyScheduler(self)
        return self._keys[key]

    def enqueue(self, key_scheduler: "KeyScheduler") -> None:
        """Add a key that is not in the ring."""
        self._ring.append(key_scheduler)
        self.schedule_round()

    def schedule_round(self) -> None:
        """Start the next round in the next iteration of the event loop, which gives each key a new slice."""
        if not self._is_round_scheduled:
            self._is_round_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        self._is_round_scheduled = False
        # If every queued key owes slices, those rounds pass at once: no other key could use them.
        self.num_rounds += 1 + min((key.num_slices_owed for key in self._ring), default=0)
        until = self.clock() + ROUND_SECONDS
        for _ in range(len(self._ring)):
            if self._ring[0].run_slice():
                self._ring.rotate(-1)
            else:
                self._ring.popleft()
            if self.clock() >= until:
                break
        if self._ring:
            self.schedule_round()


class KeyScheduler:
    """The time slices of one key; its answers share them round robin."""

    def __init__(self, loop_scheduler: LoopScheduler) -> None:
        self._loop_scheduler = loop_scheduler
        self._clock = loop_scheduler.clock
        self._waiting = deque[Work]()
        self._is_in_ring = False
        self._seconds_left = SLICE_SECONDS  # of the slice; negative: owed
        self._num_rounds = loop_scheduler.num_rounds  # when _seconds_left was updated
        self._ends_at = 0.0  # of the slice, by the clock, while work runs

    @property
    def is_over(self) -> bool:
        """Whether the slice is over: work that runs must return and leave the rest for the next slice."""
        return self._clock() >= self._ends_at

    @property
    def num_slices_owed(self) -> int:
        """The number of new slices that only pay for overrun."""
        return max(0, math.floor(-self._seconds_left / SLICE_SECONDS))

    def submit(self, work: Work) -> None:
        """Run work, or queue it if the slice is over. It must not be queued already."""
        if self._num_rounds != self._loop_scheduler.num_rounds:
            self._begin_slice()
        if self._is_in_ring or self._seconds_left <= 0 or self._do(work):
            self._waiting.append(work)
            if not self._is_in_ring:
                self._is_in_ring = True
                self._loop_scheduler.enqueue(self)

    async def run(self, steps: Iterator[None]) -> None:
        """Run all steps, in as many slices as they take. Raises what a step raises."""
        ended = asyncio.get_running_loop().create_future()

        def run_some() -> bool:
            if ended.done():
                return False  # the caller was cancelled
            try:
                for _ in steps:
                    if self.is_over:
                        return True
            except Exception as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            return False

        self.submit(run_some)
        await ended

    def run_slice(self) -> bool:
        """Run queued work for one slice. Return whether more is queued."""
        self._begin_slice()
        for _ in range(len(self._waiting)):
            if self._seconds_left <= 0:
                break
            work = self._waiting.popleft()
            if self._do(work):
                self._waiting.append(work)
        self._is_in_ring = bool(self._waiting)
        return self._is_in_ring

    def _begin_slice(self) -> None:
        num_rounds = self._loop_scheduler.num_rounds
        new_seconds = (num_rounds - self._num_rounds) * SLICE_SECONDS
        self._num_rounds, self._seconds_left = num_rounds, min(SLICE_SECONDS, self._seconds_left + new_seconds)

    def _do(self, work: Work) -> bool:
        began_at = self._clock()
        self._ends_at = began_at + self._seconds_left
        has_more = work()
        self._seconds_left -= self._clock() - began_at
        if self._seconds_left <= 0:
            self._loop_scheduler.schedule_round()
        return has_more
