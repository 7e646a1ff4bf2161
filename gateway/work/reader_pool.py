"""The entry for slow work: parsing, rendering, encoding, and checking of requests, and decoding of stored answers.

    body = await readers.run(account, len(data), partial(kind.decode, data))

Work on at most INLINE_BYTES runs at once in the caller. Longer work, and work whose time its size does not bound, waits
in the queue of its key and runs in a reader: a process for what a client sent (reader_process.py), or a thread for what
needs this process. Queues are served round robin, and a key uses one reader at a time. So its backlog delays another
key by at most one piece of work. Work whose caller was cancelled before its start is dropped. Waiting work is not
limited here: each piece belongs to an open request, whose number and bytes are divided between keys.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

INLINE_BYTES = 10_000  # encoding takes 0.4 us per byte, a template 8 us per message of 30 bytes: 4 ms at most
MAX_THREADS = 8

_Result = TypeVar("_Result")

logger = logging.getLogger("gateway")


class Reader(Protocol):
    """Runs one piece of work at a time."""

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Run work, in the thread of the caller or in a process that the caller waits for."""

    def end(self) -> None:
        """End the process. Work that it runs fails."""


class ThreadReader:
    """Runs work in the thread of the pool."""

    def run(self, work: Callable[[], _Result]) -> _Result:
        return work()

    def end(self) -> None:
        """Do nothing: a thread cannot be ended."""


@dataclass(eq=False, slots=True)
class _Piece:
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    has_begun: bool = False


class _Queue:
    """The work that one key has waiting."""

    def __init__(self) -> None:
        self.pieces = deque[_Piece]()
        self.served_at = 0  # the serial number, over all keys, of the last piece that was taken


class ReaderPool:
    """Readers that are created on demand and kept. Use it on the event loop; only the work runs elsewhere."""

    def __init__(self, make_reader: Callable[[], Reader] = ThreadReader, max_readers: int | None = None) -> None:
        """Create the pool.

        Args:
            make_reader: Creates a reader. It must return at once.
            max_readers: Default: one per processor plus one, so that one key cannot occupy a single processor.
        """
        self._make_reader = make_reader
        self._max_readers = max_readers or min(MAX_THREADS, (os.cpu_count() or 1) + 1)
        self._threads = ThreadPoolExecutor(self._max_readers, "reader")
        self._readers: list[Reader] = []
        self._idle: list[Reader] = []  # a stack: the last used is used next
        self._is_preparing = False  # a reader was created, and is not idle yet
        self._first_work: Callable[[], object] | None = None
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
        if num_bytes is not None and num_bytes <= INLINE_BYTES:  # the usual case
            return work()
        queue = self._queues.setdefault(key, _Queue())
        piece = _Piece(work, asyncio.get_running_loop().create_future())
        queue.pieces.append(piece)
        self._begin_next()
        try:
            result: _Result = await piece.done
            return result
        finally:
            if not piece.has_begun:
                queue.pieces.remove(piece)
            del piece  # breaks the reference cycle error -> frame -> piece, which would keep the work in memory

    def keep_one_ready(self, first_work: Callable[[], object]) -> None:
        """From now on keep one idle reader ready, up to the maximum of readers. `first_work` runs first in each."""
        self._first_work = first_work
        self._prepare_one()

    def close(self) -> None:
        """Drop queued work and end the readers. Running work is not waited for."""
        self._first_work = None
        self._queues.clear()
        for reader in self._readers:
            reader.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while (key := self._next_key()) is not None and (reader := self._free_reader()) is not None:
            queue = self._queues[key]
            piece = queue.pieces.popleft()
            piece.has_begun = True
            self._running.add(key)
            queue.served_at = self._num_served = self._num_served + 1
            self._start(reader, piece.work, partial(self._ended, key, piece))
        self._prepare_one()

    def _next_key(self) -> Hashable | None:
        """Return the least recently served key that has work and no reader."""
        can_be_served = [key for key, queue in self._queues.items() if queue.pieces and key not in self._running]
        return min(can_be_served, key=lambda key: self._queues[key].served_at, default=None)

    def _free_reader(self) -> Reader | None:
        """Return an idle reader, or a new one if none is being prepared."""
        if self._idle:
            return self._idle.pop()
        return None if self._is_preparing or len(self._readers) == self._max_readers else self._new_reader()

    def _new_reader(self) -> Reader:
        self._readers.append(self._make_reader())
        return self._readers[-1]

    def _start(self, reader: Reader, work: Callable[[], Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        def ended(running: asyncio.Future[Any]) -> None:
            self._idle.append(reader)
            then(running)
            self._begin_next()

        asyncio.get_running_loop().run_in_executor(self._threads, reader.run, work).add_done_callback(ended)

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
        if not self._running and not self.num_waiting:  # then the order of keys need not be kept
            self._queues.clear()

    def _prepare_one(self) -> None:
        is_full = len(self._readers) == self._max_readers
        if self._first_work is None or self._idle or self._is_preparing or is_full:
            return
        self._is_preparing = True
        self._start(self._new_reader(), self._first_work, self._prepared)

    def _prepared(self, running: asyncio.Future[Any]) -> None:
        self._is_preparing = False
        if (error := running.exception()) is not None:  # the next work in this reader raises it, if it still fails
            logger.warning("reader: preparation failed: %r", error)
