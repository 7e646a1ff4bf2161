"""The event loop shared by keys: text, JSON and events are made on it in Python, 15 us a token and 40 with 20
log-probabilities, and one key's answers may have more of them than a processor can make.

    turns = loop_turns.of(key)
    turns.begin(work)        # now while the key's slice lasts, else in its turn; again until it has nothing more to do

Deficit round robin over measured time. In each round a key has a slice; what it took too much is taken off its next
ones. Who has more to do waits in a ring, and between two rounds the loop does all else: it looks at sockets, hears the
store, answers others. So nobody waits for more than a round of others, whatever these have waiting, and a key that is
alone has all the time there is. Only callbacks wait here, one an answer: tokens stay where they came to, and what there
is no room for stays in the journal (gateway/store/response_stream.py).

It is part of a token's way back: an answer's submission begins its work here when the store has told of tokens. It
knows keys and time, and not what the work says or who reads it.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

SLICE_SECONDS = 0.0005  # of a key in a round: 30 tokens, or 12 with 20 log-probabilities; a token passes several rounds
ROUND_SECONDS = 0.003  # of all keys together, however many wait

Work: TypeAlias = Callable[[], bool]  # some of it; whether there is more. It looks at is_over, and must not raise


class LoopTurns:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.num_rounds = 0
        self._keys: dict[Hashable, KeyTurns] = {}  # as many as there are keys in the key file
        self._ring = deque[KeyTurns]()  # those that wait, the next one first
        self._is_called = False  # the next round, by the loop

    def of(self, key: Hashable) -> "KeyTurns":
        if key not in self._keys:
            self._keys[key] = KeyTurns(self)
        return self._keys[key]

    def wait(self, turns: "KeyTurns") -> None:
        """For one that is not in the ring."""
        self._ring.append(turns)
        self.call_next_round()

    def call_next_round(self) -> None:
        """Somebody's slice is over, and whoever comes in this iteration of the loop has had theirs."""
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_called = False
        # Where everybody owes slices, those rounds are over at once: nobody else is there to have them.
        self.num_rounds += 1 + min((turns.num_slices_owed for turns in self._ring), default=0)
        until = self.clock() + ROUND_SECONDS
        for _ in range(len(self._ring)):
            if self._ring[0].go_on():
                self._ring.rotate(-1)
            else:
                self._ring.popleft()
            if self.clock() >= until:
                break
        if self._ring:
            self.call_next_round()


class KeyTurns:
    """The turns of one key, whose answers take turns among themselves."""

    def __init__(self, loop_turns: LoopTurns) -> None:
        self._loop_turns = loop_turns
        self._clock = loop_turns.clock
        self._waiting = deque[Work]()
        self._is_in_ring = False
        self._seconds_left = SLICE_SECONDS  # of the slice; negative: owed
        self._num_rounds = loop_turns.num_rounds  # when that was so
        self._ends_at = 0.0  # of the slice, by the clock, while something is done in it

    @property
    def is_over(self) -> bool:
        """The slice: what is being done is to be left for the next one."""
        return self._clock() >= self._ends_at

    @property
    def num_slices_owed(self) -> int:
        """Before a new one leaves something over."""
        return max(0, math.floor(-self._seconds_left / SLICE_SECONDS))

    def begin(self, work: Work) -> None:
        """Not what waits already."""
        if self._num_rounds != self._loop_turns.num_rounds:
            self._begin_slice()
        if self._is_in_ring or self._seconds_left <= 0 or self._do(work):
            self._waiting.append(work)
            if not self._is_in_ring:
                self._is_in_ring = True
                self._loop_turns.wait(self)

    async def carry_out(self, steps: Iterator[None]) -> None:
        """Does all of them, in as many turns as they take. Raises what one of them does."""
        ended = asyncio.get_running_loop().create_future()

        def some() -> bool:
            if ended.done():
                return False  # nobody waits any more
            try:
                for _ in steps:
                    if self.is_over:
                        return True
            except Exception as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            return False

        self.begin(some)
        await ended

    def go_on(self) -> bool:
        """With what waits, in this key's turn; whether there is more."""
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
        num_rounds = self._loop_turns.num_rounds
        new_seconds = (num_rounds - self._num_rounds) * SLICE_SECONDS
        self._num_rounds, self._seconds_left = num_rounds, min(SLICE_SECONDS, self._seconds_left + new_seconds)

    def _do(self, work: Work) -> bool:
        began_at = self._clock()
        self._ends_at = began_at + self._seconds_left
        has_more = work()
        self._seconds_left -= self._clock() - began_at
        if self._seconds_left <= 0:
            self._loop_turns.call_next_round()
        return has_more
