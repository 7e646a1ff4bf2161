"""Threads for work that would block the event loop, shared fairly: one queue per key, served round robin.

    ids = await pool.run(account, 40_000, partial(encode, text))

A key uses one thread at a time, so its backlog delays another key by at most one piece of work. Short work runs at once
in the caller. Work whose caller was cancelled before its start is dropped. Everything but the work itself runs on the
event loop. Waiting work is not limited here: each piece belongs to an open request, whose number and bytes are divided
between keys. For work that holds the interpreter's lock, use threads that wait for processes (work_process.py).
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any, TypeVar

INLINE_BYTES = 10_000  # encoding takes 0.4 us per byte, a template 8 us per message of 30 bytes: 4 ms at most
MAX_THREADS = 8

_Result = TypeVar("_Result")


def is_short(num_bytes: int | None) -> bool:
    """Return whether work on `num_bytes` runs inline. None: the size does not bound the time, so it does not."""
    return num_bytes is not None and num_bytes <= INLINE_BYTES


@dataclass(eq=False, slots=True)
class _Piece:
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class _Queue:
    """The work that one key has waiting."""

    def __init__(self) -> None:
        self.pieces = deque[_Piece]()
        self.served_at = 0  # the serial number, over all keys, of the last piece that was taken


class FairPool:
    def __init__(self, num_threads: int | None = None, carry_out: Callable[[Callable[[], Any]], Any] = call) -> None:
        """Create the pool.

        Args:
            num_threads: Default: one per processor plus one, so that one key cannot occupy a single processor.
            carry_out: Runs a piece of work in a thread, or passes it to a process.
        """
        self._num_threads = num_threads or min(MAX_THREADS, (os.cpu_count() or 1) + 1)
        self._carry_out = carry_out
        self._executor = ThreadPoolExecutor(self._num_threads, "pool")
        self._queues: dict[Hashable, _Queue] = {}
        self._running = set[Hashable]()
        self._num_served = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.pieces) for queue in self._queues.values())

    async def run(self, key: Hashable, num_bytes: int | None, work: Callable[[], _Result]) -> _Result:
        """Run work for a key, and return or raise its result.

        Args:
            key: The owner of the work.
            num_bytes: The size of its input; None if the size does not bound the time.
            work: The function to run.
        """
        if is_short(num_bytes):
            return work()
        queue = self._queues.setdefault(key, _Queue())
        piece = _Piece(work, asyncio.get_running_loop().create_future())
        queue.pieces.append(piece)
        self._begin_next()
        try:
            result: _Result = await piece.done
            return result
        finally:
            with suppress(ValueError):  # it has begun
                queue.pieces.remove(piece)
            del piece  # breaks the reference cycle error -> frame -> piece, which would keep the work in memory

    def close(self) -> None:
        """Drop queued work. Running work finishes, but is not waited for."""
        self._queues.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while (key := self._next_key()) is not None:
            queue = self._queues[key]
            piece = queue.pieces.popleft()
            self._running.add(key)
            queue.served_at = self._num_served = self._num_served + 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._carry_out, piece.work)
            running.add_done_callback(partial(self._ended, key, piece))

    def _next_key(self) -> Hashable | None:
        """Return the least recently served key that has work and no thread."""
        if len(self._running) == self._num_threads:
            return None
        can_be_served = [key for key, queue in self._queues.items() if queue.pieces and key not in self._running]
        return min(can_be_served, key=lambda key: self._queues[key].served_at, default=None)

    def _ended(self, key: Hashable, piece: _Piece, running: asyncio.Future[Any]) -> None:
        self._running.discard(key)
        error = running.exception()
        if piece.done.done():
            pass  # the caller was cancelled
        elif error is None:
            piece.done.set_result(running.result())
        else:
            piece.done.set_exception(error)
            piece.done.exception()  # marks it as retrieved: the caller may be cancelled before it reads the error
        self._begin_next()
        if not self._running:  # then no work is queued either, and the order of keys need not be kept
            self._queues.clear()
