"""The follower processes of a group, managed by rank 0: start, watch, and collect stacks.

A thread starts them and notices each end at once. A missing rank never answers a collective, so the whole process ends
without using the device again, and its requests are requeued as those of any dead worker. The same holds for a
follower that a signal has stopped, or that sends no beat for PATIENCE_BEATS seconds. The kernel ends the followers with
the thread, which lives as long as this process. Followers start before rank 0 imports torch, so both imports overlap.
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

from engine_worker.execution.ranks.step_channel import RingSender
from shared.processes import LOOK_SECONDS, STOPPED_LOOKS, is_stopped

logger = logging.getLogger("worker")

_ROOT = Path(__file__).parents[3]
CANNOT_START, FAILED = 2, 1  # exit statuses of a worker
LOOKS_PER_BEAT = 4
BEAT_SECONDS = LOOKS_PER_BEAT * LOOK_SECONDS
LATE_BEATS = 5  # missed in a row; then the follower counts as down
PATIENCE_BEATS = 60  # a native call can hold the GIL for long, and reading a page of a file even longer
START_PATIENCE = 2  # factor until the first beat: an interpreter starts in 0.1 s, but later from a slow disk
DUMP_SECONDS = 1.0  # time for hanging followers to write their stacks
STOPPED_DUMP_SECONDS = 0.2  # the same for a stopped follower; shorter, because streams wait
STOPPED = "stopped by a signal"


@dataclass(frozen=True, slots=True)
class FollowerEnd:
    """A follower that ended while it was needed, or that does not respond."""

    rank: int
    size: int
    phase: str
    status: int | None  # negative signal number if a signal ended it; None: it runs but does not respond
    cause: str  # reported by the follower, or STOPPED; empty if unknown

    def __str__(self) -> str:
        rank, phase = f"rank {self.rank} of {self.size}", f"in its phase {self.phase or 'start'!r}"
        return f"{rank} {self._what(phase)}" + (f": {self.cause}" if self.cause else "")

    def _what(self, phase: str) -> str:
        if self.status is None:
            return f"does not respond {phase}"
        how = f"by signal {-self.status}" if self.status < 0 else f"with exit status {self.status}"
        return f"ended {phase} {how}"


def end_process(end: FollowerEnd) -> None:
    """End this process at once, because its engine may wait forever for the missing rank."""
    logger.critical("group: %s; all ranks end", end)
    sys.stderr.flush()
    os._exit(CANNOT_START if end.status == CANNOT_START else FAILED)


class Followers:
    on_end: Callable[[FollowerEnd], None]  # may be replaced

    def __init__(
        self,
        size: int,
        on_end: Callable[[FollowerEnd], None] = end_process,
        patience_beats: int = PATIENCE_BEATS,
    ) -> None:
        """Start ranks 1 to `size` - 1.

        Args:
            size: Number of ranks, including 0.
            on_end: Called once, in the watching thread, when a follower ends or does not respond.
            patience_beats: Number of beats that a follower may miss in a row.

        Raises:
            OSError: If a process cannot be started.
        """
        self._signs = {rank: _Signs(patience_beats) for rank in range(1, size)}
        self.size = size
        self.channel = RingSender(size)
        self.rendezvous_fd = os.memfd_create("pagestream-ranks", os.MFD_CLOEXEC)  # torch's FileStore
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
        """Return whether a follower has sent a beat recently."""
        return self._signs[rank].missed < LATE_BEATS

    def phases(self, rank: int) -> list[tuple[str, float]]:
        """Return the phases of a follower, as (name, monotonic seconds of its beginning), from its start."""
        return [("interpreter", self._started_seconds), *self.channel.phases(rank)]

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the watching thread has noticed an end, at most `seconds`. In a worker this process ends too."""
        self._thread.join(seconds)

    def dump_stacks(self, seconds: float = DUMP_SECONDS) -> None:
        """Let every follower write its stacks to stderr, also a stopped one. Takes `seconds`."""
        for process in self._processes.values():
            for number in (signal.SIGUSR1, signal.SIGCONT):
                process.send_signal(number)  # does nothing if it has ended, because the pid may be reused
        threading.Event().wait(seconds)  # faulthandler's C handler does not report when it has finished

    def close(self) -> None:
        """End the followers and the channel without calling `on_end`, for programs that continue without a group."""
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
        # Use this code's directory as path, because a clone may not be installed.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        fds_passed = (self.rendezvous_fd, *fds)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds_passed, env=environ)

    def _first_end(self) -> FollowerEnd | None:
        """Wait for the first end. Returns None if close() was called."""
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
        """Return a follower that does not respond. Call once per look: time is counted in looks, not by a clock."""
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
        """Record the current count of beats, and whether a signal has stopped the follower."""
        self.stopped_looks = self.stopped_looks + 1 if is_stopped else 0
        self._looks += 1
        if self._looks % LOOKS_PER_BEAT == 0:
            self.missed = self.missed + 1 if beats == self.beats else 0
            self.beats = beats

    @property
    def is_silent(self) -> bool:
        return self.missed >= self.patience_beats * (1 if self.beats else START_PATIENCE)
