"""Processes for work that holds the interpreter's lock: decoding, templates, checks.

    processes = WorkProcesses()
    result = processes.run(work)    # blocking, from any thread; raises what `work` raises

In a thread, one C call would block the event loop: 36 ms for a body of 10^6 token ids. Work (a module-level function
with arguments) and results travel through pipes by pickle; a served model is pickled by name (served_model.py) and
loaded once per process. The processes run at low priority and end with this one; `python -m` runs the other end.
"""

import fcntl
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from gateway.errors import GatewayError, InternalError

NICENESS = 10  # on a busy machine, a tenth of the CPU share of the event loop, the store, or a worker
_PIPE_BYTES = 2**20  # Linux's unprivileged maximum: a body of 2 MiB takes 2 writes instead of 32

_Result = TypeVar("_Result")

logger = logging.getLogger("gateway")


class WorkProcesses:
    """Processes that are started on demand and kept."""

    def __init__(self) -> None:
        self._idle: list[_WorkProcess] = []  # a stack: the last used is used next
        self._all: list[_WorkProcess] = []
        self._num_preparing = 0  # started, and not idle yet
        self._first_work: Callable[[], object] | None = None
        self._max_processes = 0
        self._changed = threading.Condition()

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Run work in a process, and return or raise its result. Raises InternalError if the process dies."""
        process = self._taken()
        self._prepare_one()
        try:
            return process.run(work)
        finally:
            self._give_back(process)

    def keep_one_ready(self, first_work: Callable[[], object], max_processes: int) -> None:
        """From now on keep one idle process ready. Return at once.

        Args:
            first_work: Runs in each process after its start.
            max_processes: Upper bound of processes, idle and busy.
        """
        self._first_work, self._max_processes = first_work, max_processes
        self._prepare_one()

    def close(self) -> None:
        """End all processes. Callers that wait for a result get InternalError."""
        with self._changed:
            self._first_work = None
            for process in self._all:
                process.end()

    def _taken(self) -> "_WorkProcess":
        with self._changed:
            while not self._idle and self._num_preparing:
                self._changed.wait()
            if not self._idle:
                self._idle.append(self._added())
            return self._idle.pop()

    def _give_back(self, process: "_WorkProcess") -> None:
        with self._changed:
            self._idle.append(process)
            self._changed.notify()

    def _added(self) -> "_WorkProcess":
        process = _WorkProcess()
        self._all.append(process)
        return process

    def _prepare_one(self) -> None:
        with self._changed:
            is_full = len(self._all) >= self._max_processes
            if self._first_work is None or self._idle or self._num_preparing or is_full:
                return
            self._num_preparing = 1
            arguments = self._added(), self._first_work
        threading.Thread(target=self._prepare, args=arguments, name="prepare", daemon=True).start()

    def _prepare(self, process: "_WorkProcess", work: Callable[[], object]) -> None:
        try:
            process.run(work)
        except Exception as error:  # the next work in this process raises it, if it still fails
            logger.warning("work process: preparation failed: %r", error)
        finally:
            self._num_preparing = 0
            self._give_back(process)


class _WorkProcess:
    """One process, started by its first work, and restarted by the next work if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._to: Connection | None = None
        self._from: Connection | None = None

    def run(self, work: Callable[[], _Result]) -> _Result:
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
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for connection in (self._to, self._from):
            if connection is not None:
                connection.close()

    def _exchange(self, payload: bytes) -> bytes:
        if self._has_ended:
            raise EOFError
        if self._process is None:
            self._start()
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
                [sys.executable, "-P", "-m", "gateway.work.work_process"], stdin=their_end, stdout=their_to
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
