"""GET /debug/fleet: the queue and the workers of each model, as the live page shows them.

The workers' figures are those of their last heartbeats, which they send every second.
"""

import msgspec
from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.fleet import WorkerStatus
from gateway.http.openapi import Operation
from gateway.http.state import STATE
from gateway.model_service import ModelService
from gateway.store.store_calls import StoreUnavailable


class WorkerBody(msgspec.Struct, kw_only=True):
    id: str
    phase: str
    running: int
    waiting: int
    max_num_seqs: int  # 0: not known yet
    kv_blocks_total: int
    kv_blocks_used: int
    generated_tokens: int  # since the start of its process
    version: str
    seconds_since_seen: float


class FleetBody(msgspec.Struct, kw_only=True):
    """A model's part of the fleet."""

    model: str
    state: str
    phase: str
    progress: float  # 0 to 1 within the phase
    queue: dict[str, int] | None  # queue -> requests that wait in it; null: the store did not answer
    generated_tokens: int  # of the workers below
    workers: list[WorkerBody]


class FleetsBody(msgspec.Struct, kw_only=True):
    models: list[FleetBody]


async def show_fleet(request: web.Request) -> web.Response:
    services = request.app[STATE].models.of(request[ACCOUNT])
    body = FleetsBody(models=[await _fleet_of(service) for service in services])
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _fleet_of(service: ModelService) -> FleetBody:
    readiness = service.readiness()
    workers = [_worker(status) for status in readiness.workers]
    return FleetBody(
        model=service.name,
        state=readiness.state,
        phase=readiness.phase,
        progress=readiness.progress,
        queue=await _waiting(service),
        generated_tokens=sum(worker.generated_tokens for worker in workers),
        workers=workers,
    )


async def _waiting(service: ModelService) -> dict[str, int] | None:
    try:
        stats = await service.client.probe.queue_stats()
    except StoreUnavailable:
        return None
    return {name: load.waiting for name, load in stats.queues.items()}


def _worker(status: WorkerStatus) -> WorkerBody:
    beat = status.heartbeat
    return WorkerBody(
        id=beat.worker_id,
        phase=beat.phase.value,
        running=beat.running,
        waiting=beat.waiting,
        max_num_seqs=beat.max_num_seqs,
        kv_blocks_total=beat.kv_blocks_total,
        kv_blocks_used=beat.kv_blocks_total - beat.kv_blocks_free,
        generated_tokens=beat.generated_tokens,
        version=beat.version,
        seconds_since_seen=round(status.seconds_since_seen, 1),
    )


OPERATIONS = (
    Operation(
        "GET",
        "/debug/fleet",
        show_fleet,
        "Queue and workers of each model",
        answer=FleetsBody,
        uncharged="the live page reads it every two seconds",
    ),
)
