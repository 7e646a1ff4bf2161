"""Probes, metrics, version, and the OpenAPI description.

/livez    the event loop runs. Worker and store failures do not change it, because a restart would not fix them
/readyz   the store takes a write, and a model takes requests because a worker is ready or expected: send traffic here
/ready    a worker of some model is ready, with phase and progress; /health is its status alone, as in vLLM,
          and so is /ping, as in SageMaker.
          Both take ?model=NAME, because with several models some may be ready and others not
"""

from dataclasses import replace
from functools import cache

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound
from gateway.fleet import Readiness, overall
from gateway.http.openapi import MODEL_PARAMETER, STATIC, TEXT, Operation, Parameter, describe
from gateway.http.routing import OPERATIONS as ALL_OPERATIONS
from gateway.http.shapes import LoadBody, ReadinessBody, StateBody, StoreReadinessBody, VersionBody
from gateway.http.state import STATE, GatewayState
from gateway.model_service import ModelService
from gateway.store.store_calls import StoreUnavailable
from shared.version import VERSION

OPENMETRICS = "application/openmetrics-text"
_ALL_QUEUES = "all"
_WITHOUT_KEY = "probes have no key"
_FOR_OPERATORS = "operators need it when a key has no budget left"


async def health(request: web.Request) -> web.Response:
    return web.Response(status=200 if overall(_asked(request)).is_ready else 503)


async def load(request: web.Request) -> web.Response:
    """Show the number of open requests, as vLLM does; load balancers read it."""
    return web.json_response({"server_load": request.app[STATE].open_requests.num_open})


async def livez(request: web.Request) -> web.Response:
    owners = request.app[STATE].owners
    if owners.failed.is_set():  # the process is about to exit
        return web.json_response({"state": "failed"}, status=503)
    return web.json_response({"state": "alive"})


async def ready(request: web.Request) -> web.Response:
    readiness = overall(_asked(request))
    allowed = request.app[STATE].models.of(request[ACCOUNT])
    body = {**readiness.as_object(), "models": {service.name: service.readiness().state for service in allowed}}
    return web.json_response(body, status=200 if readiness.is_ready else 503)


async def readyz(request: web.Request) -> web.Response:
    """Show whether to send traffic here; with ?all=true, every model must be ready. Needs no key, so names no model."""
    models = [service.readiness() for service in request.app[STATE].models]
    readiness = overall(models)
    try:
        write_seconds: float | None = await request.app[STATE].write_probe()
    except StoreUnavailable:
        write_seconds = None
    num_ready = sum(model.takes_requests for model in models)
    num_needed = len(models) if request.query.get("all") == "true" else 1
    is_ready = num_ready >= num_needed and write_seconds is not None
    body = {
        "state": readiness.state,
        "store_write_seconds": write_seconds,
        "ready_workers": readiness.ready_workers,
        "ready_models": num_ready,
        "models": len(models),
    }
    return web.json_response(body, status=200 if is_ready else 503)


def _asked(request: web.Request) -> list[Readiness]:
    """Return the readiness of the model that ?model= names; without it, of all models."""
    state, name = request.app[STATE], request.query.get("model")
    services = state.models if name is None else [state.models.find(name, request[ACCOUNT])]
    return [service.readiness() for service in services]


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await _refresh_gauges(state)
    # vLLM's metric names have colons, which the client library's OpenMetrics text does not allow.
    accept = "" if state.settings.vllm_metric_names else request.headers.get("Accept", "")
    encode, content_type = choose_encoder(accept)
    return web.Response(body=encode(state.metrics.exposed), headers={"Content-Type": content_type})


async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": VERSION})


async def show_description(request: web.Request) -> web.Response:
    return web.Response(body=_document(tuple(request.app[ALL_OPERATIONS].values())), content_type="application/json")


@cache  # takes 50 ms of CPU; a process with many gateways, as in tests, builds it once
def _document(operations: tuple[Operation, ...]) -> bytes:
    return msgspec.json.encode(describe(operations))


async def _refresh_gauges(state: GatewayState) -> None:
    gauges = state.metrics
    answers = [await _refresh_model(service) for service in state.models]
    gauges.store_memory.set(max(service.client.store_memory.used_ratio for service in state.models))
    gauges.redis_up.set(all(answers))


async def _refresh_model(service: ModelService) -> bool:
    """Update a model's gauges; return whether the store answered."""
    gauges = service.metrics
    readiness = service.readiness()
    gauges.ready_workers.set(readiness.ready_workers)
    gauges.show_fleet(status.heartbeat for status in readiness.workers)
    try:
        stats = await service.client.probe.queue_stats()
    except StoreUnavailable:
        return False
    for name, load in {_ALL_QUEUES: stats.all, **stats.queues}.items():
        gauges.queue_unfinished.labels(name).set(load.unfinished)
        gauges.queue_depth.labels(name).set(load.waiting)
        gauges.queue_pending.labels(name).set(load.pending)
        gauges.queue_oldest_age.labels(name).set(load.oldest_seconds)
    gauges.dead_letters.set(stats.dead_letters)
    return True


_HEALTH = Operation(
    "GET",
    "/health",
    health,
    "Readiness as a status code",
    other_statuses=(503,),
    errors=(ModelNotFound,),
    parameters=(MODEL_PARAMETER,),
    uncharged=_FOR_OPERATORS,
)
OPERATIONS = (
    _HEALTH,
    replace(_HEALTH, path="/ping", summary="Readiness as a status code, under SageMaker's name"),
    Operation(
        "GET", "/load", load, "Number of open requests at this gateway", answer=LoadBody, uncharged=_FOR_OPERATORS
    ),
    Operation(
        "GET",
        "/livez",
        livez,
        "Liveness of the process",
        answer=StateBody,
        other_statuses=(503,),
        is_open=True,
        uncharged=_WITHOUT_KEY,
    ),
    Operation(
        "GET",
        "/ready",
        ready,
        "Readiness with startup progress",
        answer=ReadinessBody,
        other_statuses=(503,),
        errors=(ModelNotFound,),
        parameters=(MODEL_PARAMETER,),
        uncharged=_FOR_OPERATORS,
    ),
    Operation(
        "GET",
        "/readyz",
        readyz,
        "Whether to send traffic to this gateway",
        answer=StoreReadinessBody,
        other_statuses=(503,),
        parameters=(Parameter(name="all", where="query", description="true: every model must be ready, not just one"),),
        is_open=True,
        uncharged=_WITHOUT_KEY,
    ),
    Operation("GET", "/metrics", metrics, "Prometheus metrics", media=(TEXT, OPENMETRICS), uncharged=_FOR_OPERATORS),
    Operation("GET", "/version", show_version, "Version of this gateway", answer=VersionBody, uncharged=_FOR_OPERATORS),
    Operation(
        "GET", "/openapi.json", show_description, "OpenAPI description of this API", answer=dict, uncharged=STATIC
    ),
)
