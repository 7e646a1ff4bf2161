"""GET /v1/models and /v1/models/{id}, also without /v1 for clients that omit it.

Clients that send `anthropic-version` get Anthropic's format.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from gateway.answer_shapes import ModelBody, ModelListBody
from gateway.apis.anthropic.format import speaks_anthropic
from gateway.auth.access import ACCOUNT
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.http.openapi import Operation
from gateway.http.query_fields import query_number
from gateway.http.state import STATE
from gateway.model_service import ModelService

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # Anthropic's


async def list_models(request: web.Request) -> web.Response:
    """List every name that a request may use; the root of an alias is its model."""
    state = request.app[STATE]
    named = [(service, name) for service in state.models.of(request[ACCOUNT]) for name in service.options.names]
    shown = [_shown(request, service, name) for service, name in named]
    if speaks_anthropic(request):
        return web.json_response(_anthropic_page(shown, request.query))
    return web.json_response({"object": "list", "data": shown})


async def retrieve_model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    return web.json_response(_shown(request, request.app[STATE].service(name, request[ACCOUNT]), name))


def _shown(request: web.Request, service: ModelService, name: str) -> dict[str, Any]:
    started_at = request.app[STATE].started_at_unix
    max_model_len = service.limits(service.model).max_model_len if service.model else None  # not loaded yet
    if speaks_anthropic(request):
        return _anthropic_info(name, started_at, max_model_len)
    defaults = service.model.defaults if service.model else {}
    return {
        "id": name,
        "object": "model",
        "created": started_at,
        "owned_by": "pagestream",
        "root": service.name,
        "parent": None,
        "max_model_len": max_model_len,
        **({"generation_defaults": defaults} if defaults else {}),
    }


def _anthropic_info(name: str, started_at: int, max_model_len: int | None) -> dict[str, Any]:
    """Return a model in Anthropic's format; `created_at` is the gateway's start, as release dates are unknown."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def _anthropic_page(infos: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the models after `after_id`, or the last ones before `before_id`. Raise InvalidRequest."""
    limit = query_number(query, "limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
    after, before = _place(infos, query, "after_id"), _place(infos, query, "before_id")
    there = infos[0 if after is None else after + 1 : before]
    chosen = there[:limit] if before is None else there[-limit:]
    return {
        "data": list(chosen),
        "has_more": len(there) > limit,
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _place(infos: Sequence[Mapping[str, Any]], query: Mapping[str, str], name: str) -> int | None:
    given = query.get(name)
    if not given:
        return None
    for index, info in enumerate(infos):
        if info["id"] == given:
            return index
    raise InvalidRequest(f"{name}: {given[:100]!r} is not a model of this list.", param=name)


_OPERATIONS = (
    Operation("GET", "/models", list_models, "List the models", answer=ModelListBody),
    # {id:.+}: names such as organization/model contain slashes
    Operation("GET", "/models/{id:.+}", retrieve_model, "Retrieve a model", answer=ModelBody, errors=(ModelNotFound,)),
)
OPERATIONS = tuple(operation.below(prefix) for prefix in ("/v1", "") for operation in _OPERATIONS)
