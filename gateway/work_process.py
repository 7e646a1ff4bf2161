"""Processes for work that keeps the interpreter's lock: decoding, templates, checks. A thread would hold up the event
loop for as long as one call of C takes: 36 ms for a body of 10^6 token ids.

    processes = WorkProcesses()
    result = processes.run(work)    # blocking, from any thread; raises what `work` raises

There are as many as were ever needed at one time, and one more if one is to be ready. Work and result go through pipes
by pickle: a work is a function of a module with its arguments. A served model among them is only named
(served_model.py), and loaded there once. The processes yield to whatever else wants to run, and end with this one. Run
as a module it is the other end.

A chat's way in, where its body is long: it is decoded, validated and planned here. It knows nothing of keys, queues or
the event loop.
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

NICENESS = 10  # a tenth of what the event loop, the store and the worker have, where these leave no processor free
_PIPE_BYTES = 2**20  # the most that Linux gives to anybody: a body of 2 MiB in two writes, and not in 32

_Result = TypeVar("_Result")

logger = logging.getLogger("gateway")


class WorkProcesses:
    def __init__(self) -> None:
        self._idle: list[_WorkProcess] = []  # the last that worked is the first to work again
        self._all: list[_WorkProcess] = []
        self._num_preparing = 0  # that are not idle yet
        self._first_work: Callable[[], object] | None = None
        self._most = 0
        self._changed = threading.Condition()

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Return what the work does, or raise what it does; InternalError if its process dies."""
        process = self._taken()
        self._prepare_one()
        try:
            return process.run(work)
        finally:
            self._give_back(process)

    def keep_one_ready(self, first_work: Callable[[], object], most: int) -> None:
        """From now on have one more than are at work, of at most so many: it was started, and has done `first_work`,
        before somebody waits for it. Returns at once."""
        self._first_work, self._most = first_work, most
        self._prepare_one()

    def close(self) -> None:
        """Whoever still waits for a result hears InternalError."""
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
            if self._first_work is None or self._idle or self._num_preparing or len(self._all) >= self._most:
                return
            self._num_preparing = 1
            arguments = self._added(), self._first_work
        threading.Thread(target=self._prepare, args=arguments, name="prepare", daemon=True).start()

    def _prepare(self, process: "_WorkProcess", work: Callable[[], object]) -> None:
        try:
            process.run(work)
        except Exception as error:  # whoever works there next is told, if it is so then
            logger.warning("a process for long requests is not prepared: %r", error)
        finally:
            self._num_preparing = 0
            self._give_back(process)


class _WorkProcess:
    """Started by the first work, and again by the next one if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._to: Connection | None = None
        self._from: Connection | None = None

    def run(self, work: Callable[[], _Result]) -> _Result:
        try:
            is_result, value = pickle.loads(self._asked(pickle.dumps(work, pickle.HIGHEST_PROTOCOL)))
        except (EOFError, OSError) as error:
            self._reap()
            raise InternalError() from error
        try:
            if not is_result:
                raise value
            result: _Result = value
            return result
        finally:
            del value  # an error has this frame, which would have it: a circle that holds the work for long

    def end(self) -> None:
        """Also while it works in another thread, whose pipe is then at its end."""
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

    def _asked(self, payload: bytes) -> bytes:
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
            with suppress(OSError):  # more than this system lets one have
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gateway.work_process"], stdin=their_end, stdout=their_to
            )
        finally:
            os.close(their_end)
            os.close(their_to)
        self._to, self._from = Connection(our_to, readable=False), Connection(our_from, writable=False)


def main() -> None:
    """Until the other end has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the gateway hears it too, and ends this
    os.nice(NICENESS)
    works, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # whatever prints
    with suppress(EOFError, OSError):
        while True:
            replies.send_bytes(_reply_to(works.recv_bytes()))


def _reply_to(payload: bytes) -> bytes:
    try:
        reply = True, pickle.loads(payload)()
    except Exception as error:
        reply = False, _told(error)
    try:
        return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # what cannot be sent
        return pickle.dumps((False, RuntimeError(repr(error))), pickle.HIGHEST_PROTOCOL)


def _told(error: Exception) -> Exception:
    """Pickle leaves the traceback behind; the log has it where the error is one that nobody expects."""
    if not isinstance(error, GatewayError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    return error


if __name__ == "__main__":
    main()
