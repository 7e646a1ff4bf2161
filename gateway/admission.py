"""Who is let in: how far the workers are, how much is open here, and why somebody is not. Pure.

    Fleet           the heartbeats of one model's workers; ages are counted by this process's monotonic clock alone
    assess()        Readiness, the states of /ready: starting (nothing has been ready yet) -> ready; waiting while all
                    workers are gone and the next one is waited for; no_worker when it has not come; draining at the end
    OpenRequests    the inference requests that this gateway is answering, of all models: a drain waits for them
    admit()         asked before anything is encoded

This is the gateway's own view. The queue's cap is not decided here: only the store's ACCEPT knows the queue's true
length, and it refuses with BUSY.

A chat's way in, before its prompt is made. It knows no HTTP, no metrics and no store.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.auth.rate_limits import Account
from gateway.divided_resource import DividedResource
from gateway.errors import GatewayError, RateLimited, Unavailable
from shared.capabilities import Abilities
from shared.messages import WorkerHeartbeat, WorkerPhase

SUPERVISOR_ID = "supervisor"  # tells the phases before a worker exists
# Beats come every second, but behind an engine step: a long prefill on a busy CPU delays them.
STALE_AFTER_SECONDS = 10.0
# Work at hand and no step ended: a prefill takes a second or two, a hung device for ever. Its watchdog waits for 30 s.
STALLED_AFTER_SECONDS = 15.0
FORGET_AFTER_SECONDS = 60.0
_PHASE_ORDER = tuple(WorkerPhase)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    heartbeat: WorkerHeartbeat
    seconds_since_seen: float
    seconds_since_progress: float = 0.0  # 0 while it has nothing to do; else since its step counter moved


class Fleet:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.was_ready = asyncio.Event()  # a worker has said so
        self._clock = clock
        self._ready: tuple[WorkerHeartbeat, float] | None = None  # the last that said so, and when
        self._seen: dict[str, tuple[WorkerHeartbeat, float, float]] = {}  # (the last, when, when it made progress)
        self._ready_now: list[WorkerHeartbeat] = []
        self._abilities: list[Abilities] = []  # of those
        self._old: list[Abilities] = []  # of those that do not compare capabilities
        self._ready_until = 0.0  # by the clock, unless a heartbeat is heard

    def record_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        now = self._clock()
        before, _, progress_at = self._seen.get(heartbeat.worker_id, (None, now, now))
        has_work = heartbeat.running + heartbeat.waiting > 0
        stands_still = has_work and before is not None and heartbeat.step == before.step
        self._seen[heartbeat.worker_id] = (heartbeat, now, progress_at if stands_still else now)
        if heartbeat.phase is WorkerPhase.READY and heartbeat.worker_id != SUPERVISOR_ID:
            self._ready = heartbeat, now
            self.was_ready.set()
        self._ready_until = now

    @property
    def ready(self) -> list[WorkerHeartbeat]:
        """The workers that take requests now. Each request asks several times, so the list is kept while it stays the
        same: but for a heartbeat only silence changes it."""
        now = self._clock()
        if now >= self._ready_until:
            self._ready_now = ready_workers(self.snapshot())
            seen_at = (self._seen[heartbeat.worker_id][1] for heartbeat in self._ready_now)
            self._ready_until = min(seen_at, default=math.inf) + STALE_AFTER_SECONDS
            self._abilities = [Abilities(beat.capabilities, beat.max_model_len) for beat in self._ready_now]
            self._old = [one for one in self._abilities if not one.capabilities]
        return self._ready_now

    def can_serve(self, needs: int) -> bool:
        """Return whether a ready worker has these capabilities, or none is ready and the next one may."""
        return not self.ready or any(not needs & ~one.capabilities for one in self._abilities)

    def an_old_worker_fails(self, needs: int, context_tokens: int) -> bool:
        """Return whether a ready worker would take a request that it cannot serve: it is older than capabilities and
        does not compare them."""
        return bool(self.ready and self._old) and any(not one.serve(needs, context_tokens) for one in self._old)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    state: str  # starting | ready | waiting | no_worker | draining
    phase: str
    progress: float
    detail: str
    elapsed_seconds: float
    ready_workers: int
    workers: tuple[WorkerStatus, ...]

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
            "workers": [_as_object(status) for status in self.workers],
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
        workers=tuple(status for status in alive if status.heartbeat.worker_id != SUPERVISOR_ID),
    )


def overall(models: Sequence[Readiness]) -> Readiness:
    """The readiness of all models as one: where one is ready, traffic is welcome; else how far the furthest is."""
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
        "fingerprint": beat.fingerprint,
        "seconds_since_seen": round(status.seconds_since_seen, 1),
        "seconds_since_progress": round(status.seconds_since_progress, 1),
    }


class Gauge(Protocol):
    """A metric with the label of the route."""

    def labels(self, route: str) -> Any: ...


class OpenRequests:
    """The inference requests that this gateway answers, of all models: new answers, attaches and reads of kept ones."""

    def __init__(self, gauge: Gauge, max_open: int, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        """`on_refusal`: called with the error code of each request that is refused."""
        self.draining = False  # no more are admitted
        self._gauge = gauge
        self._on_refusal = on_refusal
        self._places = DividedResource(
            "open streams",
            "--max-num-streams",
            max_open,
            lambda: unavailable("gateway_full", f"This gateway holds {max_open} open requests, its limit."),
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, route: str, account: Account) -> AbstractContextManager[None]:
        """Count a request until the returned context ends. Raises Unavailable, and KeyShareExceeded."""
        try:
            if self.draining:
                raise unavailable("draining")
            self._places.take(account, 1)
        except GatewayError as error:
            self._on_refusal(error.code)
            raise
        return self._counted(route, account.owner_key_hash)

    @contextmanager
    def _counted(self, route: str, key: str) -> Iterator[None]:
        gauge = self._gauge.labels(route)
        self._idle.clear()
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            self._places.give_back(key, 1)
            if not self._places.num_held:
                self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


RETRY_AFTER_SECONDS = {
    "draining": 1,  # another gateway, or this one restarted, answers at once
    "gateway_full": 2,
    "queue_full": 2,
    "queue_timeout": 5,  # it has waited already
    "starting": 2,
    "needs_newer_worker": 5,
    "no_worker": 5,  # a restart with cached weights takes about this long on two cores
    "store_unavailable": 2,
    "name_contended": 1,
    "store_full": 5,  # room comes as requests end, and ended ones leave after ten minutes
}
SHARE_RETRY_AFTER_SECONDS = 10
_MESSAGES = {
    "draining": "This gateway is shutting down.",
    "queue_full": "The queue is full; try again later.",
    "queue_timeout": "No worker began with this request in the time that it had.",
    "starting": "The model is being loaded; GET /ready tells how far it is.",
    "no_worker": "No engine worker is ready.",
    "needs_newer_worker": "No ready worker is new enough for this request; a rolling upgrade may be under way.",
    "store_unavailable": "The request store does not take requests now.",
    "name_contended": "Too many requests with this Idempotency-Key came and went at the same time.",
    "store_full": "The request store is nearly full; its room is kept for open requests.",
}


@dataclass(frozen=True)
class Load:
    """The gateway's view at this moment."""

    draining: bool
    model_loaded: bool  # the tokenizer is there
    ready_workers: int
    was_ready: bool  # a worker has been ready since this gateway began
    is_waited_for: bool  # the next one: requests are taken while none is ready
    store_has_room: bool


def admit(load: Load) -> None:
    """Raises Unavailable."""
    if load.draining:
        raise unavailable("draining")
    if not load.model_loaded or (load.ready_workers == 0 and not load.was_ready):
        raise unavailable("starting")
    if load.ready_workers == 0 and not load.is_waited_for:
        raise unavailable("no_worker")
    if not load.store_has_room:
        raise unavailable("store_full")


def unavailable(reason: str, message: str = "") -> Unavailable:
    """The refusal for this reason; `message`: in other words than its own."""
    return Unavailable(message or _MESSAGES[reason], code=reason, retry_after_seconds=RETRY_AFTER_SECONDS[reason])


def bytes_in_flight(max_bytes: int) -> DividedResource:
    """Return the count of bytes that are being received or not yet sent, of all keys together."""
    message = f"This gateway holds as many bytes of bodies as it may, {max_bytes} (--max-bytes-in-flight)."
    return DividedResource(
        "bytes in flight", "--max-bytes-in-flight", max_bytes, lambda: unavailable("gateway_full", message)
    )


def share_full(max_bytes: int) -> RateLimited:
    return RateLimited(
        f"What this key's requests hold in the store would be more than its share, {max_bytes} bytes; they leave it "
        "ten minutes after their end.",
        code="store_share_exceeded",
        retry_after_seconds=SHARE_RETRY_AFTER_SECONDS,
    )
