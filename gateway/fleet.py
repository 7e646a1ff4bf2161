"""Who serves this model, as told by heartbeats. Ages are counted by this process's monotonic clock alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.messages import WorkerHeartbeat

FORGET_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    heartbeat: WorkerHeartbeat
    seconds_since_seen: float


class Fleet:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[WorkerHeartbeat, float]] = {}

    def heard(self, heartbeat: WorkerHeartbeat) -> None:
        self._seen[heartbeat.worker_id] = (heartbeat, self._clock())

    def snapshot(self) -> list[WorkerStatus]:
        """Workers (and "supervisor") heard within the last minute, by id."""
        now = self._clock()
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] <= FORGET_AFTER_SECONDS}
        return [WorkerStatus(heartbeat, now - at) for _, (heartbeat, at) in sorted(self._seen.items())]
