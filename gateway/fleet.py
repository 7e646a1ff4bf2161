"""Admission at the gateway: worker states, open requests, readiness, and the reasons of a refusal. Pure.

    Fleet           the heartbeats of one model's workers; ages use this process's monotonic clock
    state_of()      starting until a worker was ready; then ready; waiting while all workers are gone and the gateway
                    waits for the next; no_worker after that wait; draining at the end
    assess()        Readiness, the body of /ready
    OpenRequests    the inference requests of all models that this gateway answers; a drain waits for them
    check_state()   the check before a request is encoded

The queue's limit is not checked here: only ACCEPT in the store knows the exact length, and it answers BUSY.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.auth.divided_resource import DividedResource
from gateway.auth.rate_limits import Account
from gateway.errors import GatewayError, RateLimited, Unavailable
from shared.capabilities import Abilities
from shared.messages import WorkerHeartbeat, WorkerPhase

SUPERVISOR_ID = "supervisor"  # reports the phases before a worker exists
# Heartbeats come each second, but a long prefill on a busy CPU delays them.
STALE_AFTER_SECONDS = 10.0
# Time without a finished step while a worker has requests: a prefill takes 1-2 s. The worker's watchdog waits 30 s.
STALLED_AFTER_SECONDS = 15.0
FORGET_AFTER_SECONDS = 60.0
_PHASE_ORDER = tuple(WorkerPhase)
_TAKES_REQUESTS = ("ready", "waiting")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    heartbeat: WorkerHeartbeat
    seconds_since_seen: float
    seconds_since_progress: float = 0.0  # since the step counter moved; 0 without requests


class Fleet:
    """The workers of one model, as their heartbeats describe them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.was_ready = asyncio.Event()  # set by the first heartbeat of a ready worker
        self.num_finished = 0  # requests, by all workers since this gateway's start
        self._clock = clock
        self._ready: tuple[WorkerHeartbeat, float] | None = None  # the latest heartbeat of a ready worker, its time
        self._seen: dict[str, tuple[WorkerHeartbeat, float, float]] = {}  # latest heartbeat, its time, last progress
        self._ready_now: list[WorkerHeartbeat] = []
        self._abilities: list[Abilities] = []  # of the ready workers
        self._old: list[Abilities] = []  # of ready workers that do not compare capabilities
        self._ready_until = 0.0  # when the list of ready workers must be computed again

    def record_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """Store the state of a worker."""
        now = self._clock()
        before, _, progress_at = self._seen.get(heartbeat.worker_id, (None, now, now))
        known = before.finished_requests if before else heartbeat.finished_requests
        self.num_finished += max(0, heartbeat.finished_requests - known)
        has_work = heartbeat.running + heartbeat.waiting > 0
        stands_still = has_work and before is not None and heartbeat.step == before.step
        self._seen[heartbeat.worker_id] = (heartbeat, now, progress_at if stands_still else now)
        if heartbeat.phase is WorkerPhase.READY and heartbeat.worker_id != SUPERVISOR_ID:
            self._ready = heartbeat, now
            self.was_ready.set()
        self._ready_until = now

    @property
    def ready(self) -> list[WorkerHeartbeat]:
        """The heartbeats of workers that take requests now.

        Cached, because each request reads it several times: only a heartbeat or an expired one changes the list.
        """
        now = self._clock()
        if now >= self._ready_until:
            self._ready_now = ready_workers(self.snapshot())
            seen_at = (self._seen[heartbeat.worker_id][1] for heartbeat in self._ready_now)
            self._ready_until = min(seen_at, default=math.inf) + STALE_AFTER_SECONDS
            self._abilities = [Abilities(beat.capabilities, beat.max_model_len) for beat in self._ready_now]
            self._old = [one for one in self._abilities if not one.capabilities]
        return self._ready_now

    def can_serve(self, needs: int) -> bool:
        """Return whether a ready worker has these capabilities; True if none is ready, because the next one may."""
        return not self.ready or any(not needs & ~one.capabilities for one in self._abilities)

    def an_old_worker_fails(self, needs: int, context_tokens: int) -> bool:
        """Return whether a ready worker could claim a request that it cannot serve.

        Workers older than capabilities do not compare them.
        """
        return bool(self.ready and self._old) and any(not one.serve(needs, context_tokens) for one in self._old)

    @property
    def last_ready(self) -> WorkerStatus | None:
        """The status of the worker that last reported ready, however long ago; None if none has yet."""
        return WorkerStatus(self._ready[0], self._clock() - self._ready[1]) if self._ready else None

    def snapshot(self) -> list[WorkerStatus]:
        """Return the workers, and the supervisor, with a heartbeat in the last minute, by id."""
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
        """Whether requests are accepted. True also while the gateway waits for a worker."""
        return self.state in _TAKES_REQUESTS

    def as_object(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "phase": self.phase,
            "progress": self.progress,
            "detail": self.detail,
            "elapsed_s": round(self.elapsed_seconds, 1),
            "workers": [_as_object(status) for status in self.workers],
        }


def state_of(*, draining: bool, model_loaded: bool, num_ready: int, was_ready: bool, is_waited_for: bool) -> str:
    """Return the state of a model.

    Args:
        draining: The gateway takes no new requests.
        model_loaded: The tokenizer is loaded.
        num_ready: Number of ready workers.
        was_ready: A worker has been ready since this gateway started.
        is_waited_for: Requests are accepted while no worker is ready.
    """
    if draining:
        return "draining"
    if not model_loaded or not (num_ready or was_ready):
        return "starting"
    if num_ready:
        return "ready"
    return "waiting" if is_waited_for else "no_worker"


def check_state(state: str, *, store_has_room: bool) -> None:
    """Raise Unavailable if no request can be accepted in this state."""
    if state not in _TAKES_REQUESTS:
        raise unavailable(state)
    if not store_has_room:
        raise unavailable("store_full")


def assess(fleet: Sequence[WorkerStatus], state: str, elapsed_seconds: float) -> Readiness:
    alive = [status for status in fleet if status.seconds_since_seen < STALE_AFTER_SECONDS]
    phase, progress, detail = _furthest(alive, state)
    return Readiness(
        state=state,
        phase=phase,
        progress=progress,
        detail=detail,
        elapsed_seconds=elapsed_seconds,
        ready_workers=len(ready_workers(fleet)),
        workers=tuple(status for status in alive if status.heartbeat.worker_id != SUPERVISOR_ID),
    )


def overall(models: Sequence[Readiness]) -> Readiness:
    """Return one readiness for all models: that of the model that is furthest."""
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
    """Return the heartbeats of workers that are ready, recent, and not stalled."""
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
        return WorkerPhase.STARTING.value, 0.0, "no heartbeat from a worker yet"
    furthest = max(on_their_way, key=lambda beat: (_PHASE_ORDER.index(beat.phase), beat.progress))
    if furthest.phase is WorkerPhase.READY:
        return WorkerPhase.WARMUP.value, 1.0, "the gateway is loading the tokenizer"
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
    """The open inference requests of all models: new answers, attaches, and reads of stored answers."""

    def __init__(self, gauge: Gauge, max_open: int, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        """Create the count.

        Args:
            gauge: Open requests by route.
            max_open: The limit, divided between API keys.
            on_refusal: Called with the error code of each refused request.
        """
        self.draining = False  # True: no new requests
        self._gauge = gauge
        self._on_refusal = on_refusal
        self._places = DividedResource(
            "open streams",
            "--max-num-streams",
            max_open,
            lambda: unavailable(
                "gateway_full", f"This gateway has {max_open} open requests, its limit (--max-num-streams)."
            ),
        )
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, route: str, account: Account) -> AbstractContextManager[None]:
        """Count a request until the returned context ends.

        Raises:
            Unavailable: If the gateway is draining or full.
            KeyShareExceeded: If the key would exceed its share.
        """
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

    @property
    def num_open(self) -> int:
        return self._places.num_held

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is open. Return False on timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


RETRY_AFTER_SECONDS = {
    "draining": 1,  # another gateway, or this one after a restart, answers at once
    "gateway_full": 2,
    "queue_full": 2,
    "queue_timeout": 5,  # the request has waited already
    "starting": 2,
    "needs_newer_worker": 5,
    "no_worker": 5,  # a worker restart with cached weights takes about 5 s on two cores
    "store_unavailable": 2,
    "store_not_replicated": 1,
    "store_recovering": 2,
    "name_contended": 1,
    "store_full": 5,  # requests leave the store 10 minutes after their end
}
SHARE_RETRY_AFTER_SECONDS = 10
_MESSAGES = {
    "draining": "This gateway is shutting down.",
    "queue_full": "The queue is full; try again later.",
    "queue_timeout": "No worker started this request within queue_timeout_seconds.",
    "starting": "The model is loading; GET /ready reports the progress.",
    "no_worker": "No engine worker is ready.",
    "needs_newer_worker": "No ready worker is new enough for this request; a rolling upgrade may be under way.",
    "store_unavailable": "The request store is not available; try again later.",
    "store_recovering": "The request store is new or has lost its data; running requests return to it in seconds.",
    "store_not_replicated": "No replica of the request store has the request (--durable-accept); nothing was accepted.",
    "name_contended": "Too many concurrent requests use this Idempotency-Key; try again.",
    "store_full": "The request store is nearly full; new requests are refused so that open ones can finish.",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a request in seconds; 0 means none."""

    total_seconds: float
    queue_seconds: float
    no_worker_seconds: float = 0.0  # queue timeout while no worker is ready, if the request has none

    def __bool__(self) -> bool:
        return bool(self.total_seconds or self.queue_seconds)


def unavailable(reason: str, message: str = "") -> Unavailable:
    """Return the error of a reason.

    Args:
        reason: An error code of RETRY_AFTER_SECONDS.
        message: Replaces the default message.
    """
    return Unavailable(message or _MESSAGES[reason], code=reason, retry_after_seconds=RETRY_AFTER_SECONDS[reason])


def bytes_in_flight(max_bytes: int) -> DividedResource:
    """Return the count of bytes that are being received or not yet sent, divided between keys."""
    message = f"This gateway holds {max_bytes} bytes of request and response bodies, its limit (--max-bytes-in-flight)."
    return DividedResource(
        "bytes in flight", "--max-bytes-in-flight", max_bytes, lambda: unavailable("gateway_full", message)
    )


def starts_late(num_ahead: int, wait_seconds: float, retry_after_seconds: float) -> RateLimited:
    """Return the error of a request that would not start within its queue time limit."""
    return RateLimited(
        f"{num_ahead} requests wait before this one, for about {wait_seconds:.0f} s: it would not start within "
        "queue_timeout_seconds.",
        code="queue_wait_exceeded",
        retry_after_seconds=retry_after_seconds,
    )


def share_full(max_bytes: int) -> RateLimited:
    """Return the error of a key whose requests would hold more than `max_bytes` in the store."""
    return RateLimited(
        f"The requests of this API key would exceed its share of the store, {max_bytes} bytes. A request leaves the "
        "store 10 minutes after its end.",
        code="store_share_exceeded",
        retry_after_seconds=SHARE_RETRY_AFTER_SECONDS,
    )
