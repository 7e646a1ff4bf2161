"""Threads for work that would hold up the event loop, shared fairly: a queue a key, served in turn.

    ids = await pool.run(account, 40_000, partial(encode, text))

What many keys ask for is done in turn, one piece each, however many pieces one of them has waiting. A key has one
thread at a time, so the backlog of one delays nobody else's work at all, and that of many by a piece of each at most.
Work that is sure to be short is done at once, in the caller's own turn. A piece whose caller has gone is not begun.
All but the work itself happens on the event loop. Work that keeps the interpreter's lock is for a pool whose threads
only wait for other processes (work_process.py).

A chat's way in, where its body is decoded, validated and encoded. It knows keys and sizes, and not what the work is.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any, TypeVar

INLINE_BYTES = 10_000  # of JSON or text: encoding takes 0.4 us a byte, a template 8 us a message of 30: 4 ms at most
MAX_WAITING = 1024  # pieces of one key
MAX_WAITING_BYTES = 64 * 2**20  # what they hold
MAX_THREADS = 8

_Result = TypeVar("_Result")


def is_short(num_bytes: int | None) -> bool:
    """Whether work on so many bytes is done at once; None: their number tells nothing of its time."""
    return num_bytes is not None and num_bytes <= INLINE_BYTES


class TooMuchWaits(Exception):
    """This key has as much waiting as it may have; come again a little later."""


@dataclass(eq=False, slots=True)
class _Piece:
    work: Callable[[], Any]
    num_bytes: int
    done: asyncio.Future[Any]


class _Queue:
    """The work that one key has waiting."""

    def __init__(self) -> None:
        self.pieces = deque[_Piece]()
        self.num_bytes = 0
        self.served_at = 0  # the number of the last piece that was taken, of all keys together

    def has_room(self, num_bytes: int) -> bool:
        is_empty = not self.pieces  # one piece may be larger than all should be
        fits = len(self.pieces) < MAX_WAITING and self.num_bytes + num_bytes <= MAX_WAITING_BYTES
        return is_empty or fits

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.num_bytes += piece.num_bytes

    def take(self) -> _Piece:
        piece = self.pieces.popleft()
        self.num_bytes -= piece.num_bytes
        return piece

    def drop(self, piece: _Piece) -> None:
        if piece in self.pieces:
            self.pieces.remove(piece)
            self.num_bytes -= piece.num_bytes


class FairPool:
    def __init__(self, num_threads: int | None = None, carry_out: Callable[[Callable[[], Any]], Any] = call) -> None:
        """Default: a thread for each processor, and one more: no key by itself may have all of one processor.

        `carry_out`: what a thread does with a piece of work, which may be to hand it on."""
        self._num_threads = num_threads or min(MAX_THREADS, (os.cpu_count() or 1) + 1)
        self._carry_out = carry_out
        self._executor = ThreadPoolExecutor(self._num_threads, "pool")
        self._queues: dict[Hashable, _Queue] = {}
        self._running = set[Hashable]()
        self._num_served = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.pieces) for queue in self._queues.values())

    async def run(
        self, key: Hashable, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool = True
    ) -> _Result:
        """Return or raise what `work` does. `num_bytes`: of what it reads; None if its size tells nothing of its time.

        Raises TooMuchWaits, unless the work is part of what was accepted before.
        """
        if is_short(num_bytes):
            return work()
        queue = self._queues.setdefault(key, _Queue())
        if may_refuse and not queue.has_room(num_bytes or 0):
            raise TooMuchWaits
        piece = _Piece(work, num_bytes or 0, asyncio.get_running_loop().create_future())
        queue.add(piece)
        self._begin_next()
        try:
            result: _Result = await piece.done
            return result
        finally:
            queue.drop(piece)
            del piece  # its error has this frame, which would have it: a circle that holds the work for long

    def close(self) -> None:
        """Work that runs is run to its end; nothing is waited for."""
        self._queues.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while (key := self._next_key()) is not None:
            queue = self._queues[key]
            piece = queue.take()
            self._running.add(key)
            queue.served_at = self._num_served = self._num_served + 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._carry_out, piece.work)
            running.add_done_callback(partial(self._ended, key, piece))

    def _next_key(self) -> Hashable | None:
        """The key that was served longest ago, of those that have a piece and may have a thread."""
        if len(self._running) == self._num_threads:
            return None
        can_be_served = [key for key, queue in self._queues.items() if queue.pieces and key not in self._running]
        return min(can_be_served, key=lambda key: self._queues[key].served_at, default=None)

    def _ended(self, key: Hashable, piece: _Piece, running: asyncio.Future[Any]) -> None:
        self._running.discard(key)
        error = running.exception()
        if piece.done.done():
            pass  # its caller has gone
        elif error is None:
            piece.done.set_result(running.result())
        else:
            piece.done.set_exception(error)
            piece.done.exception()  # nobody need hear of it: its caller may go before its turn comes
        self._begin_next()
        if not self._running:  # then nothing waits either, and whose turn it was is nobody's loss
            self._queues.clear()
