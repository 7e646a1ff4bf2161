"""Is the service ready, and if not, how far is it: one answer from the fleet's heartbeats. Pure.

The states of /ready: starting (nothing has been ready yet) -> ready; waiting while all workers are gone and the next
one is waited for; no_worker when it has not come; draining at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shared.messages import WorkerHeartbeat, WorkerPhase

SUPERVISOR_ID = "supervisor"  # tells the phases before a worker exists
# Beats come every second, but behind an engine step: a long prefill on a busy CPU delays them.
STALE_AFTER_SECONDS = 10.0
# Work at hand and no step ended: a prefill takes a second or two, a hung device for ever. Its watchdog waits for 30 s.
STALLED_AFTER_SECONDS = 15.0
_PHASE_ORDER = tuple(WorkerPhase)


class WorkerStatus(Protocol):
    @property
    def heartbeat(self) -> WorkerHeartbeat: ...

    @property
    def seconds_since_seen(self) -> float: ...

    @property
    def seconds_since_progress(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    state: str  # starting | ready | waiting | no_worker | draining
    phase: str
    progress: float
    detail: str
    elapsed_seconds: float
    ready_workers: int
    workers: tuple[dict[str, Any], ...]

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def takes_requests(self) -> bool:
        """Also while a worker is waited for: whoever sends requests elsewhere then, or nowhere, loses them."""
        return self.state in ("ready", "waiting")

    def as_object(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "phase": self.phase,
            "progress": self.progress,
            "detail": self.detail,
            "elapsed_s": round(self.elapsed_seconds, 1),
            "workers": list(self.workers),
        }


def assess(
    fleet: Sequence[WorkerStatus],
    *,
    model_loaded: bool,
    was_ready: bool,
    is_waited_for: bool,
    draining: bool,
    elapsed_seconds: float,
) -> Readiness:
    alive = [status for status in fleet if status.seconds_since_seen < STALE_AFTER_SECONDS]
    num_ready = len(ready_workers(fleet))
    if draining:
        state = "draining"
    elif num_ready and model_loaded:
        state = "ready"
    elif was_ready and model_loaded:
        state = "waiting" if is_waited_for else "no_worker"
    else:
        state = "starting"
    phase, progress, detail = _furthest(alive, state)
    return Readiness(
        state=state,
        phase=phase,
        progress=progress,
        detail=detail,
        elapsed_seconds=elapsed_seconds,
        ready_workers=num_ready,
        workers=tuple(_as_object(status) for status in alive if status.heartbeat.worker_id != SUPERVISOR_ID),
    )


def overall(models: Sequence[Readiness]) -> Readiness:
    """Of all models as one: where one is ready, traffic is welcome; else how far the furthest is."""
    furthest = max(
        models,
        key=lambda model: (model.is_ready, model.takes_requests, _PHASE_ORDER.index(WorkerPhase(model.phase))),
    )
    return replace(
        furthest,
        ready_workers=sum(model.ready_workers for model in models),
        workers=tuple(worker for model in models for worker in model.workers),
    )


def ready_workers(fleet: Sequence[WorkerStatus]) -> list[WorkerHeartbeat]:
    return [
        status.heartbeat
        for status in fleet
        if status.heartbeat.phase is WorkerPhase.READY
        and status.heartbeat.worker_id != SUPERVISOR_ID
        and status.seconds_since_seen < STALE_AFTER_SECONDS
        and status.seconds_since_progress < STALLED_AFTER_SECONDS
    ]


def _furthest(alive: Sequence[WorkerStatus], state: str) -> tuple[str, float, str]:
    if state == "ready":
        return WorkerPhase.READY.value, 1.0, ""
    on_their_way = [status.heartbeat for status in alive if status.heartbeat.phase is not WorkerPhase.DRAINING]
    if not on_their_way:
        return WorkerPhase.STARTING.value, 0.0, "no worker has been heard yet"
    furthest = max(on_their_way, key=lambda beat: (_PHASE_ORDER.index(beat.phase), beat.progress))
    if furthest.phase is WorkerPhase.READY:
        return WorkerPhase.WARMUP.value, 1.0, "the gateway reads the tokenizer"
    return furthest.phase.value, furthest.progress, furthest.detail


def _as_object(status: WorkerStatus) -> dict[str, Any]:
    beat = status.heartbeat
    return {
        "id": beat.worker_id,
        "phase": beat.phase.value,
        "progress": beat.progress,
        "step": beat.step,
        "running": beat.running,
        "waiting": beat.waiting,
        "seconds_since_seen": round(status.seconds_since_seen, 1),
        "seconds_since_progress": round(status.seconds_since_progress, 1),
    }
