"""The processes of a group's followers, from rank 0's side: started, watched, asked for their stacks.

A thread of its own starts them and sees each end at once, whatever the engine waits for: a rank that is gone never
answers a collective, so rank 0 ends too, without a further word to the device. What the group held is taken over like
that of any dead worker. The kernel ends the followers with that thread, which lives as long as this process.

It stands beside a worker of several ranks from its load to its end. It knows no model and no step.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_worker.execution.step_channel import RingSender

logger = logging.getLogger("worker")

_ROOT = Path(__file__).parents[2]
CANNOT_START, FAILED = 2, 1  # exit statuses of a worker
DUMP_SECONDS = 1.0  # for stacks to be written by followers that hang or are stopped


@dataclass(frozen=True, slots=True)
class FollowerEnd:
    """A follower that has ended while it was needed."""

    rank: int
    size: int
    phase: str
    status: int  # minus the signal's number if one ended it
    cause: str  # by its own account; empty: it had no time to tell

    def __str__(self) -> str:
        how = f"by signal {-self.status}" if self.status < 0 else f"with exit status {self.status}"
        told = f": {self.cause}" if self.cause else ""
        return f"rank {self.rank} of {self.size} ended in its phase {self.phase or 'start'!r} {how}{told}"


def end_process(end: FollowerEnd) -> None:
    """End this process at once: its engine may wait for the rank that is gone, and never hears of it."""
    logger.critical("%s; the group ends whole", end)
    sys.stderr.flush()
    os._exit(CANNOT_START if end.status == CANNOT_START else FAILED)


class Followers:
    def __init__(
        self, size: int, channel: RingSender, rendezvous_fd: int, on_end: Callable[[FollowerEnd], None] = end_process
    ) -> None:
        """Start ranks 1 to `size` - 1; OSError if one cannot be. `on_end` is called once, in a thread of its own.

        `rendezvous_fd`: a memfd for the ranks to find each other by.
        """
        self.size = size
        self._channel = channel
        self._rendezvous_fd = rendezvous_fd
        self._on_end = on_end
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._started = threading.Event()
        self._problem: OSError | None = None
        self._closing, self._close = os.pipe()
        self._thread = threading.Thread(target=self._start_and_watch, name="followers", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def dump_stacks(self) -> None:
        """Have every follower write its stacks to stderr; a stopped one is woken for it. Takes DUMP_SECONDS."""
        for pid in self.pids:
            for number in (signal.SIGUSR1, signal.SIGCONT):
                os.kill(pid, number)
        threading.Event().wait(DUMP_SECONDS)  # nobody says when a handler in C has written

    def close(self) -> None:
        """End the followers; nobody is told. For programs that go on without their group."""
        os.write(self._close, b"x")
        self._thread.join()

    def _start_and_watch(self) -> None:
        try:
            for rank in range(1, self.size):
                self._processes[rank] = self._start(rank)
        except OSError as error:
            self._problem = error
        self._started.set()
        if self._problem is None and (end := self._first_end()) is not None:
            self._on_end(end)
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        fds = self._channel.fds(rank)
        argv = [sys.executable, "-P", "-m", "engine_worker.follower", str(os.getpid()), str(rank), str(self.size)]
        argv += [str(fd) for fd in (self._rendezvous_fd, *fds)]
        # From where this code is, whatever the current directory has: of a clone it may not be installed.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        fds_passed = (self._rendezvous_fd, *fds)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds_passed, env=environ)

    def _first_end(self) -> FollowerEnd | None:
        """Wait for it; None: close() was called."""
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poll = select.poll()
        for fd in (self._closing, *ranks):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        for fd in ranks:
            os.close(fd)
        if self._closing in ready:
            return None
        rank = next(ranks[fd] for fd in ready)
        status = self._processes[rank].wait()
        return FollowerEnd(rank, self.size, self._channel.phase(rank), status, self._channel.cause(rank))
