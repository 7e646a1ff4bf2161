"""Ends a process whose engine hangs in a step, after writing its stacks.

Time is counted in ticks of this task, so a stopped process misses none. On a CPU, a tick in which the engine's thread
computed counts as a tenth, so that a slow step on a busy machine is not taken for a hung one. If the event loop also
hangs, because a native call keeps the interpreter's lock, an outside process ends this one later (loop_watch.py).
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
BUSY_TICK = 0.1  # ticks: a computing step gets 300 s, a waiting one 30 s
BUSY_SECONDS = 0.01  # of CPU time per tick, which even one of 100 threads on a core gets


def dump_stacks(dump_others: Callable[[], None] | None = None) -> None:
    """Write the stacks of all threads to stderr.

    Args:
        dump_others: Makes the other processes of this worker write theirs.
    """
    if dump_others is not None:
        dump_others()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class LoopWatch:
    """The process that ends this one if its event loop makes no tick for a while."""

    def __init__(self, timeout_ticks: int) -> None:
        """Start the process. Raises OSError on failure."""
        faulthandler.enable()  # writes the stacks on SIGABRT, which loop_watch.py sends
        script = Path(__file__).with_name("loop_watch.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(timeout_ticks)], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._ticks = self._process.stdin.fileno()
        os.set_blocking(self._ticks, False)

    def tick(self) -> None:
        """Report that the event loop runs."""
        with suppress(BrokenPipeError, BlockingIOError):  # the process was killed or stopped
            os.write(self._ticks, b".")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class StepWatchdog:
    """Counts the ticks of the running step."""

    def __init__(self, engine: EngineThread, timeout_ticks: int, on_hung: Callable[[], None]) -> None:
        """Create the watchdog. `on_hung`: called with each tick of a hung step."""
        self.is_cpu = False  # whether the engine's thread computes the steps itself; set after loading
        self._engine = engine
        self._timeout_ticks = timeout_ticks
        self._on_hung = on_hung
        self._num_steps = 0
        self._ticks_in_step = 0.0
        self._cpu_seconds = 0.0

    async def run(self) -> None:
        """Tick each second until cancelled."""
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
        """Count a tick of the running step, and call on_hung if it hangs."""
        same_step = self._engine.in_step and self._engine.num_steps == self._num_steps
        before, self._cpu_seconds = self._cpu_seconds, self._engine.cpu_seconds
        is_busy = self.is_cpu and self._cpu_seconds - before >= BUSY_SECONDS
        self._num_steps = self._engine.num_steps
        self._ticks_in_step = self._ticks_in_step + (BUSY_TICK if is_busy else 1.0) if same_step else 0.0
        if self.is_hung:
            logger.critical("watchdog: no engine step ended for %g s: exiting", self._timeout_ticks * TICK_SECONDS)
            self._on_hung()
