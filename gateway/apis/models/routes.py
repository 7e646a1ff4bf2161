"""GET /v1/models and /v1/models/{id}, also without /v1 for clients that omit it.

A header may select the format of another API (http/dialect.py).
"""

from typing import Any

from aiohttp import web

from gateway.apis.models.shapes import ModelBody, ModelListBody
from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound
from gateway.http.dialect import dialect_of
from gateway.http.openapi import Operation
from gateway.http.state import STATE
from gateway.model_service import ModelService
from gateway.pipeline.api import Api


async def list_models(request: web.Request) -> web.Response:
    """List every name that a request may use; the root of an alias is its model."""
    state = request.app[STATE]
    named = [(service, name) for service in state.models.of(request[ACCOUNT]) for name in service.options.names]
    shown = [_shown(request, service, name) for service, name in named]
    dialect = dialect_of(request)
    if dialect is not None and dialect.list_models is not None:
        return web.json_response(dialect.list_models(shown, request.query))
    return web.json_response({"object": "list", "data": shown})


async def retrieve_model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    return web.json_response(_shown(request, request.app[STATE].models.find(name, request[ACCOUNT]), name))


def _shown(request: web.Request, service: ModelService, name: str) -> dict[str, Any]:
    started_at = request.app[STATE].started_at_unix
    max_model_len = service.limits(service.model).max_model_len if service.model else None  # not loaded yet
    dialect = dialect_of(request)
    if dialect is not None and dialect.show_model is not None:
        return dialect.show_model(name, started_at, max_model_len)
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


_REASON = "names from memory"
_OPERATIONS = (
    Operation("GET", "/models", list_models, "List the models", answer=ModelListBody, uncharged=_REASON),
    # {id:.+}: names such as organization/model contain slashes
    Operation(
        "GET",
        "/models/{id:.+}",
        retrieve_model,
        "Retrieve a model",
        answer=ModelBody,
        errors=(ModelNotFound,),
        uncharged=_REASON,
    ),
)
API = Api(operations=tuple(operation.below(prefix) for prefix in ("/v1", "") for operation in _OPERATIONS))
