"""End a process whose engine hangs: one step takes too long. The stacks are written first.

Time is counted in ticks of this task: a process that was stopped and goes on has missed nothing. On a CPU a tick in
which the engine's thread computed counts a tenth, so a slow step of a busy machine is not taken for a hung one. If the
event loop hangs as well (a native call that keeps the interpreter's lock), a process outside ends this one later
(loop_watch.py).
"""

import faulthandler
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine_worker.engine_thread import EngineThread
from shared.ticks import next_tick

logger = logging.getLogger("worker")

EXIT_CODE_HUNG = 86
TICK_SECONDS = 1.0
BUSY_TICK = 0.1  # of a tick: 300 s for a step that computes, where one that waits has 30
BUSY_SECONDS = 0.01  # of CPU time in a tick: one of a hundred threads on a core still gets so much


def dump_stacks(dump_others: Callable[[], None] | None = None) -> None:
    """`dump_others` has the other processes of this worker write their stacks, into the same log."""
    if dump_others is not None:
        dump_others()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class LoopWatch:
    """The process that ends this one if its event loop makes no tick for a while."""

    def __init__(self, timeout_ticks: int) -> None:
        """Start it. Raises OSError if no process can be started."""
        faulthandler.enable()  # it sends SIGABRT
        script = Path(__file__).with_name("loop_watch.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(timeout_ticks)], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._ticks = self._process.stdin.fileno()
        os.set_blocking(self._ticks, False)

    def tick(self) -> None:
        """Tell it that the event loop turns."""
        with suppress(BrokenPipeError, BlockingIOError):  # somebody killed or stopped it
            os.write(self._ticks, b".")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class StepWatchdog:
    def __init__(self, engine: EngineThread, timeout_ticks: int, on_hung: Callable[[], None]) -> None:
        """`on_hung`: called with each tick from then on, until the process ends."""
        self.is_cpu = False  # the engine's thread computes the steps itself; set when it is known
        self._engine = engine
        self._timeout_ticks = timeout_ticks
        self._on_hung = on_hung
        self._num_steps = 0
        self._ticks_in_step = 0.0
        self._cpu_seconds = 0.0

    async def run(self) -> None:
        """Owner task."""
        loop_watch = LoopWatch(2 * self._timeout_ticks)
        try:
            while True:
                await next_tick(TICK_SECONDS)
                loop_watch.tick()
                self.tick()
        finally:
            loop_watch.close()

    @property
    def is_hung(self) -> bool:
        return round(self._ticks_in_step, 6) >= self._timeout_ticks

    def tick(self) -> None:
        """Count a tick of the step that runs, and act on one that hangs."""
        same_step = self._engine.in_step and self._engine.num_steps == self._num_steps
        before, self._cpu_seconds = self._cpu_seconds, self._engine.cpu_seconds
        is_busy = self.is_cpu and self._cpu_seconds - before >= BUSY_SECONDS
        self._num_steps = self._engine.num_steps
        self._ticks_in_step = self._ticks_in_step + (BUSY_TICK if is_busy else 1.0) if same_step else 0.0
        if self.is_hung:
            logger.critical("no engine step ended for %g s: this process ends", self._timeout_ticks * TICK_SECONDS)
            self._on_hung()
