"""Ends a process whose engine hangs: one step for too long, and nobody can say why, so the stacks are dumped first.

Time is counted in ticks of this task itself: a process that was stopped and goes on has missed nothing. Should the
event loop hang as well (a native call that keeps the interpreter's lock), a timer outside of it ends the process later.

It stands beside every step; its end of the process is the beginning of a takeover. It knows no request.
"""

import faulthandler
import logging
import sys
from collections.abc import Callable

from engine_worker.engine_thread import EngineThread
from shared.ticks import next_tick

logger = logging.getLogger("worker")

EXIT_CODE_HUNG = 86
TICK_SECONDS = 1.0


def dump_stacks(dump_others: Callable[[], None] | None = None) -> None:
    """`dump_others` has the other processes of this worker write their stacks, into the same log."""
    if dump_others is not None:
        dump_others()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


class StepWatchdog:
    def __init__(self, engine: EngineThread, timeout_ticks: int, on_hung: Callable[[], None]) -> None:
        """`on_hung`: called with each tick from then on, until the process ends."""
        self._engine = engine
        self._timeout_ticks = timeout_ticks
        self._on_hung = on_hung
        self._num_steps = 0
        self._ticks_in_step = 0

    async def run(self) -> None:
        renewal_ticks = max(1, self._timeout_ticks // 6)  # each renewal is another thread of the interpreter's
        try:
            while True:
                faulthandler.dump_traceback_later(2 * self._timeout_ticks * TICK_SECONDS, exit=True)
                for _ in range(renewal_ticks):
                    await next_tick(TICK_SECONDS)
                    self.tick()
        finally:
            faulthandler.cancel_dump_traceback_later()

    @property
    def is_hung(self) -> bool:
        return self._ticks_in_step >= self._timeout_ticks

    def tick(self) -> None:
        same_step = self._engine.in_step and self._engine.num_steps == self._num_steps
        self._num_steps = self._engine.num_steps
        self._ticks_in_step = self._ticks_in_step + 1 if same_step else 0
        if self.is_hung:
            logger.critical("no engine step ended for %g s: this process ends", self._timeout_ticks * TICK_SECONDS)
            self._on_hung()
