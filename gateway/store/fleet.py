"""Who serves this model, as told by heartbeats. Ages are counted by this process's monotonic clock alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission import SUPERVISOR_ID
from shared.messages import WorkerHeartbeat, WorkerPhase

FORGET_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    heartbeat: WorkerHeartbeat
    seconds_since_seen: float
    seconds_since_progress: float = 0.0  # 0 while it has nothing to do; else since its step counter moved


class Fleet:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: tuple[WorkerHeartbeat, float] | None = None  # the last that said so, and when
        self._seen: dict[str, tuple[WorkerHeartbeat, float, float]] = {}  # (the last, when, when it made progress)

    def heard(self, heartbeat: WorkerHeartbeat) -> None:
        now = self._clock()
        before, _, progress_at = self._seen.get(heartbeat.worker_id, (None, now, now))
        has_work = heartbeat.running + heartbeat.waiting > 0
        stands_still = has_work and before is not None and heartbeat.step == before.step
        self._seen[heartbeat.worker_id] = (heartbeat, now, progress_at if stands_still else now)
        if heartbeat.phase is WorkerPhase.READY and heartbeat.worker_id != SUPERVISOR_ID:
            self._ready = heartbeat, now

    @property
    def last_ready(self) -> WorkerStatus | None:
        """The worker that was the last to say that it is ready, however long ago; None: none has yet."""
        return WorkerStatus(self._ready[0], self._clock() - self._ready[1]) if self._ready else None

    def snapshot(self) -> list[WorkerStatus]:
        """Workers (and "supervisor") heard within the last minute, by id."""
        now = self._clock()
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] <= FORGET_AFTER_SECONDS}
        return [
            WorkerStatus(heartbeat, now - seen_at, seen_at - progress_at)
            for _, (heartbeat, seen_at, progress_at) in sorted(self._seen.items())
        ]
