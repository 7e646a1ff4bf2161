"""Divides the event loop between API keys: text, JSON and events are Python work on it, 15-40 us per token.

    scheduler = loop_scheduler.of(key)
    scheduler.submit(work)      # runs now if the key has time left in its slice, else in a later round

Algorithm: fair queueing by measured time. A round gives slices to the keys with queued work, each to the one that has
had the least time. So overrun is repaid. A key that returns counts as if it had had as much as that one, so unused time
is not saved. Between two rounds the loop handles sockets and store messages. A key that is alone gets all the time, and
its work runs at once, while its data is in the CPU caches: in rounds a token cost 5 % more.
Only callbacks are queued, one per answer: tokens stay where they arrived, and overflow stays in the journal
(gateway/store/inbox.py).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from typing import TypeAlias

SLICE_SECONDS = 0.0005  # per key and round: 30 tokens, or 12 with 20 logprobs; a token takes several rounds
ROUND_SECONDS = 0.003  # of all keys together, however many wait

Work: TypeAlias = Callable[[], bool]  # does a part, checks is_over, returns whether more is left; must not raise


class LoopScheduler:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.least_seconds = 0.0  # that each key has had, or counts as if it had
        self.queued: dict[KeyScheduler, None] = {}  # keys with queued work, in order of arrival
        self.num_active = 0  # keys with open answers
        self._keys: dict[Hashable, KeyScheduler] = {}  # at most as many as the key file has keys
        self._is_round_scheduled = False

    def of(self, key: Hashable) -> "KeyScheduler":
        """Return the scheduler of a key; the same object for each call."""
        if key not in self._keys:
            self._keys[key] = KeyScheduler(self)
        return self._keys[key]

    def schedule_round(self) -> None:
        """Start the next round in the next iteration of the event loop, which gives each key a new slice."""
        if not self._is_round_scheduled:
            self._is_round_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_round)

    def _run_round(self) -> None:
        self._is_round_scheduled = False
        if not self.queued:
            self.least_seconds += SLICE_SECONDS
        until = self.clock() + ROUND_SECONDS
        for _ in range(len(self.queued)):
            key_scheduler = min(self.queued, key=attrgetter("seconds"))
            self.least_seconds = key_scheduler.seconds
            if not key_scheduler.run_slice():
                del self.queued[key_scheduler]
            if self.clock() >= until:
                break
        if self.queued:
            self.schedule_round()


class KeyScheduler:
    """The time slices of one key; its answers share them round robin."""

    def __init__(self, loop_scheduler: LoopScheduler) -> None:
        self.seconds = 0.0  # that it has had
        self._loop_scheduler = loop_scheduler
        self._num_answers = 0  # open ones
        self._clock = loop_scheduler.clock
        self._waiting = deque[Work]()
        self._ends_at = 0.0  # of the slice, by the clock, while work runs

    @property
    def is_over(self) -> bool:
        """Whether the slice is over: work that runs must return and leave the rest for the next slice."""
        return self._clock() >= self._ends_at

    def open(self) -> None:
        """Count an answer that will submit work, until close()."""
        self._loop_scheduler.num_active += not self._num_answers
        self._num_answers += 1

    def close(self) -> None:
        self._num_answers -= 1
        self._loop_scheduler.num_active -= not self._num_answers

    def submit(self, work: Work) -> None:
        """Run work, or queue it if the slice is over. It must not be queued already."""
        scheduler = self._loop_scheduler
        if self.seconds < scheduler.least_seconds:
            self.seconds = scheduler.least_seconds
        elif self._num_answers and scheduler.num_active == 1:
            scheduler.least_seconds = self.seconds  # no other key waits: its next slice begins
        had_slice = self.seconds >= scheduler.least_seconds + SLICE_SECONDS
        if self in scheduler.queued or had_slice or self._do(work):
            self._waiting.append(work)
            scheduler.queued[self] = None
            scheduler.schedule_round()

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
        for _ in range(len(self._waiting)):
            if self.seconds >= self._loop_scheduler.least_seconds + SLICE_SECONDS:
                break
            work = self._waiting.popleft()
            if self._do(work):
                self._waiting.append(work)
        return bool(self._waiting)

    def _do(self, work: Work) -> bool:
        began_at = self._clock()
        seconds_left = self._loop_scheduler.least_seconds + SLICE_SECONDS - self.seconds
        self._ends_at = began_at + seconds_left
        has_more = work()
        seconds = self._clock() - began_at
        self.seconds += seconds
        if seconds >= seconds_left:
            self._loop_scheduler.schedule_round()
        return has_more
