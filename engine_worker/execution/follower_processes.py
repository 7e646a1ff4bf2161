"""The processes of a group's followers, from rank 0's side: started, watched, asked for their stacks.

A thread of its own starts them and sees each end at once, whatever the engine waits for: a rank that is gone never
answers a collective, so rank 0 ends too, without a further word to the device. What the group held is taken over like
that of any dead worker. So it is when a follower stands still, while it loads or idles too: the kernel tells
its parent of one that a signal has stopped, and each beats once a second, for whatever else may keep it.
The kernel ends the followers with that thread, which lives as long as this process.

They are started first of all: what they import takes as long as it takes rank 0, and runs beside it.

It stands beside a worker of several ranks from its start to its end. It knows no model, no step and no torch.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_worker.execution.step_channel import RingSender
from shared.processes import LOOK_SECONDS, STOPPED_LOOKS, is_stopped

logger = logging.getLogger("worker")

_ROOT = Path(__file__).parents[2]
CANNOT_START, FAILED = 2, 1  # exit statuses of a worker
LOOKS_PER_BEAT = 4
BEAT_SECONDS = LOOKS_PER_BEAT * LOOK_SECONDS
LATE_BEATS = 5  # missed in a row, and it counts as down
PATIENCE_BEATS = 60  # a native call may keep the interpreter to itself for long, a page of a file for longer
START_PATIENCE = 2  # times as many until the first beat: an interpreter starts in 0.1 s, from a slow disk in more
DUMP_SECONDS = 1.0  # for stacks to be written by followers that hang
STOPPED_DUMP_SECONDS = 0.2  # and by one that was merely stopped, for which streams wait
STOPPED = "a signal has stopped it"


@dataclass(frozen=True, slots=True)
class FollowerEnd:
    """A follower that has ended while it was needed, or that stands still."""

    rank: int
    size: int
    phase: str
    status: int | None  # minus the signal's number if one ended it; None: it is there, and gives no sign of life
    cause: str  # by its own account, but of one that is stopped; empty: it had no time to tell

    def __str__(self) -> str:
        rank, phase = f"rank {self.rank} of {self.size}", f"in its phase {self.phase or 'start'!r}"
        return f"{rank} {self._what(phase)}" + (f": {self.cause}" if self.cause else "")

    def _what(self, phase: str) -> str:
        if self.status is None:
            return f"stands still {phase}"
        how = f"by signal {-self.status}" if self.status < 0 else f"with exit status {self.status}"
        return f"ended {phase} {how}"


def end_process(end: FollowerEnd) -> None:
    """End this process at once: its engine may wait for the rank that is gone, and never hears of it."""
    logger.critical("%s; the group ends whole", end)
    sys.stderr.flush()
    os._exit(CANNOT_START if end.status == CANNOT_START else FAILED)


class Followers:
    on_end: Callable[[FollowerEnd], None]  # may be another one later

    def __init__(
        self,
        size: int,
        on_end: Callable[[FollowerEnd], None] = end_process,
        patience_beats: int = PATIENCE_BEATS,
    ) -> None:
        """Start ranks 1 to `size` - 1; OSError if one cannot be. `on_end` is called once, in a thread of its own.

        `patience_beats`: that one may miss in a row.
        """
        self._signs = {rank: _Signs(patience_beats) for rank in range(1, size)}
        self.size = size
        self.channel = RingSender(size)
        self.rendezvous_fd = os.memfd_create("pagestream-ranks", os.MFD_CLOEXEC)  # for the ranks to find each other by
        self.on_end = on_end
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._started = threading.Event()
        self._problem: OSError | None = None
        self._closing, self._close = os.pipe()
        self._started_seconds = time.monotonic()
        self._thread = threading.Thread(target=self._start_and_watch, name="followers", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def lives(self, rank: int) -> bool:
        """Whether a follower has beaten of late."""
        return self._signs[rank].missed < LATE_BEATS

    def phases(self, rank: int) -> list[tuple[str, float]]:
        """As the channel has them, from this process's own start of it on."""
        return [("interpreter", self._started_seconds), *self.channel.phases(rank)]

    def wait_for_end(self, seconds: float) -> None:
        """Give the thread that watches so long to see an end, which in a worker is this process's end too."""
        self._thread.join(seconds)

    def dump_stacks(self, seconds: float = DUMP_SECONDS) -> None:
        """Have every follower write its stacks to stderr; a stopped one is woken for it. Takes `seconds`."""
        for process in self._processes.values():
            for number in (signal.SIGUSR1, signal.SIGCONT):
                process.send_signal(number)  # to nobody where it has ended: its number may be another process's
        threading.Event().wait(seconds)  # nobody says when a handler in C has written

    def close(self) -> None:
        """End the followers and the channel; nobody is told. For programs that go on without their group."""
        os.write(self._close, b"x")
        self._thread.join()
        self.channel.close()
        for fd in (self.rendezvous_fd, self._closing, self._close):
            os.close(fd)

    def _start_and_watch(self) -> None:
        try:
            for rank in range(1, self.size):
                self._processes[rank] = self._start(rank)
        except OSError as error:
            self._problem = error
        self._started.set()
        if self._problem is None and (end := self._first_end()) is not None:
            self.on_end(end)
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        fds = self.channel.fds(rank)
        argv = [sys.executable, "-P", "-m", "engine_worker.follower", str(os.getpid()), str(rank), str(self.size)]
        argv += [str(fd) for fd in (self.rendezvous_fd, *fds)]
        # From where this code is, whatever the current directory has: of a clone it may not be installed.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        fds_passed = (self.rendezvous_fd, *fds)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds_passed, env=environ)

    def _first_end(self) -> FollowerEnd | None:
        """Wait for it; None: close() was called."""
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poll = select.poll()
        for fd in (self._closing, *ranks):
            poll.register(fd, select.POLLIN)
        still: FollowerEnd | None = None
        while not (ready := {fd for fd, _ in poll.poll(1e3 * LOOK_SECONDS)}) and still is None:
            still = self._standing_still()
        for fd in ranks:
            os.close(fd)
        if self._closing in ready:
            return None
        if ready:
            rank = next(ranks[fd] for fd in ready)
            return self._end(rank, self._processes[rank].wait(), self.channel.cause(rank))
        assert still is not None
        self.dump_stacks(STOPPED_DUMP_SECONDS if still.cause == STOPPED else DUMP_SECONDS)
        return still

    def _end(self, rank: int, status: int | None, cause: str) -> FollowerEnd:
        return FollowerEnd(rank, self.size, self.channel.phase(rank), status, cause)

    def _standing_still(self) -> FollowerEnd | None:
        """To be asked once a look: time is counted in these, so a stop of this process is none of theirs."""
        for rank, signs in self._signs.items():
            signs.look(self.channel.beats(rank), is_stopped(self._processes[rank].pid))
        stopped = [rank for rank, signs in self._signs.items() if signs.stopped_looks >= STOPPED_LOOKS]
        silent = [rank for rank, signs in self._signs.items() if signs.is_silent]
        found = next(iter([*stopped, *silent]), None)
        return self._end(found, None, STOPPED if stopped else "") if found is not None else None


@dataclass(slots=True)
class _Signs:
    """The signs of life of a follower since it was started."""

    patience_beats: int
    beats: int = 0
    missed: int = 0
    stopped_looks: int = 0  # in a row
    _looks: int = 0

    def look(self, beats: int, is_stopped: bool) -> None:
        """`beats` is the count now; `is_stopped`: by a signal."""
        self.stopped_looks = self.stopped_looks + 1 if is_stopped else 0
        self._looks += 1
        if self._looks % LOOKS_PER_BEAT == 0:
            self.missed = self.missed + 1 if beats == self.beats else 0
            self.beats = beats

    @property
    def is_silent(self) -> bool:
        return self.missed >= self.patience_beats * (1 if self.beats else START_PATIENCE)
