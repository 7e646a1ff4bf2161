"""A process that reads requests: it holds its own interpreter's lock while it decodes, renders, and checks.

    process = ReaderProcess()
    result = process.run(work)    # blocking; raises what `work` raises

In a thread, one C call would block the event loop: 36 ms for a body of 10^6 token ids. Work (a module-level function
with arguments) and results travel through pipes by pickle; a served model is pickled by name (served_model.py) and
loaded once per process. It runs at low priority and ends with this process; `python -m` runs the other end.
"""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from gateway.errors import GatewayError, InternalError

NICENESS = 10  # on a busy machine, a tenth of the CPU share of the event loop, the store, or a worker
_PIPE_BYTES = 2**20  # Linux's unprivileged maximum: a body of 2 MiB takes 2 writes instead of 32

_Result = TypeVar("_Result")


class ReaderProcess:
    """Implements Reader (reader_pool.py). Started by its first work, and restarted by the next work if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._to: Connection | None = None
        self._from: Connection | None = None

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Run work, and return or raise its result. Raises InternalError if the process dies."""
        try:
            is_result, value = pickle.loads(self._exchange(pickle.dumps(work, pickle.HIGHEST_PROTOCOL)))
        except (EOFError, OSError) as error:
            self._reap()
            raise InternalError() from error
        try:
            if not is_result:
                raise value
            result: _Result = value
            return result
        finally:
            del value  # breaks the reference cycle error -> frame -> error, which would keep the work in memory

    def end(self) -> None:
        """End the process. A thread that waits for its result gets EOFError."""
        self._has_ended = True
        process = self._process  # the waiting thread drops it as soon as it is dead
        if process is not None:
            process.kill()
            process.wait()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for connection in (self._to, self._from):
            if connection is not None:
                connection.close()

    def _exchange(self, payload: bytes) -> bytes:
        if self._process is None:
            self._start()
        if self._has_ended:  # read after the start: end() sets it before it looks for a process, so one of us sees it
            raise EOFError
        assert self._to is not None and self._from is not None
        self._to.send_bytes(payload)
        return self._from.recv_bytes()

    def _start(self) -> None:
        (their_end, our_to), (our_from, their_to) = os.pipe(), os.pipe()
        for descriptor in (our_to, our_from):
            with suppress(OSError):  # the system's limit is lower
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gateway.work.reader_process"], stdin=their_end, stdout=their_to
            )
        finally:
            os.close(their_end)
            os.close(their_to)
        self._to, self._from = Connection(our_to, readable=False), Connection(our_from, writable=False)


def main() -> None:
    """Run work from stdin until the gateway closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the gateway, which ends this process
    os.nice(NICENESS)
    works, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # print() goes to stderr, because stdout carries the replies
    with suppress(EOFError, OSError):
        while True:
            replies.send_bytes(_reply_to(works.recv_bytes()))


def _reply_to(payload: bytes) -> bytes:
    try:
        reply = True, pickle.loads(payload)()
    except Exception as error:
        reply = False, _with_traceback(error)
    try:
        return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the result cannot be pickled
        return pickle.dumps((False, RuntimeError(repr(error))), pickle.HIGHEST_PROTOCOL)


def _with_traceback(error: Exception) -> Exception:
    """Add the traceback of an unexpected error as a note, because pickle drops it."""
    if not isinstance(error, GatewayError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error


if __name__ == "__main__":
    main()
