"""Callbacks that run a few per iteration of the event loop, first in, first out.

When hundreds of clients act at once, one iteration would serve them all and hold up every stream meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable

LONG_ITERATION_SECONDS = 0.005  # after it half as many run, else one more; a probe takes about six iterations


class Turns:
    def __init__(self, fewest: int, most: int) -> None:
        """Run between `fewest` and `most` callbacks per iteration, fewer while iterations are long."""
        self._fewest, self._most = fewest, most
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_scheduled = False

    def add(self, turn: Callable[[], object]) -> None:
        self._waiting.append(turn)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._run(self._fewest)

    def run_all(self) -> None:
        """Run what waits in the next iteration."""
        self._start(len(self._waiting))

    def _run(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self._start(min(count, len(self._waiting)))
        loop.call_soon(self._run_next, count, loop.time())

    def _start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            loop.call_soon(self._waiting.popleft())

    def _run_next(self, last: int, began_at: float) -> None:
        self._is_scheduled = bool(self._waiting)
        if self._waiting:
            is_long = asyncio.get_running_loop().time() - began_at > LONG_ITERATION_SECONDS
            self._run(max(self._fewest, last // 2) if is_long else min(self._most, last + 1))
