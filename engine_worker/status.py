"""The worker's current state, for heartbeats, health routes, and phase lines in the log.

Loading reports from the engine's thread; all others read. Each update assigns one frozen value, so no lock is needed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.scheduling.stats import EngineStats
from shared.capabilities import SUPPORTED
from shared.messages import WorkerHeartbeat, WorkerPhase

logger = logging.getLogger("worker")

LINE_INTERVAL_SECONDS = 10.0  # between two log lines of a long phase


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    phase: WorkerPhase
    progress: float
    detail: str
    started_seconds: float


class WorkerStatus:
    """The phase, the counts, and the identity of one worker."""

    def __init__(self, worker_id: str, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker_id = worker_id  # the base id until the first registration, then the incarnation's
        self.max_model_len = 0
        self.fingerprint = ""  # of the served model
        self.max_num_seqs = 0
        self.stats: EngineStats | None = None
        self._version = version
        self._clock = clock
        self._now = PhaseProgress(WorkerPhase.STARTING, 0.0, "", clock())
        self._line_seconds = clock()

    @property
    def now(self) -> PhaseProgress:
        return self._now

    def report(self, phase: str, progress: float, detail: str = "") -> None:
        """Set the phase and its progress (0-1). Logs a line when a phase starts and ends."""
        before, now_seconds = self._now, self._clock()
        is_new = phase != before.phase
        started_seconds = now_seconds if is_new else before.started_seconds
        self._now = PhaseProgress(WorkerPhase(phase), progress, detail, started_seconds)
        if is_new or progress >= 1.0 > before.progress:
            self._print()

    def remind(self) -> None:
        """Log a line if the phase has been silent for LINE_INTERVAL_SECONDS. Call it every second."""
        if self._now.phase != WorkerPhase.READY and self._clock() - self._line_seconds >= LINE_INTERVAL_SECONDS:
            self._print()

    def heartbeat(self, num_steps: int, *, in_step: bool = False) -> WorkerHeartbeat:
        """Return the heartbeat to publish.

        A worker in a step counts as busy, because the counts may be from before a long or hung step.
        """
        now, stats = self._now, self.stats
        return WorkerHeartbeat(
            worker_id=self.worker_id,
            phase=now.phase,
            progress=now.progress,
            detail=now.detail,
            step=num_steps,
            running=max(stats.num_running if stats else 0, int(in_step)),
            waiting=stats.num_waiting if stats else 0,
            max_model_len=self.max_model_len,
            kv_blocks_total=stats.kv_cache.num_blocks if stats else 0,
            kv_blocks_free=stats.kv_cache.num_available_blocks if stats else 0,
            version=self._version,
            capabilities=SUPPORTED,
            fingerprint=self.fingerprint,
            max_num_seqs=self.max_num_seqs,
            generated_tokens=stats.counters.generated_tokens if stats else 0,
            finished_requests=stats.counters.num_served if stats else 0,
        )

    def _print(self) -> None:
        now, self._line_seconds = self._now, self._clock()
        elapsed_seconds = self._line_seconds - now.started_seconds
        logger.info("%s %3.0f %% after %.1f s %s", now.phase, 100 * now.progress, elapsed_seconds, now.detail)
