"""GET /v1/models and /v1/models/{id}; also without /v1, where some clients look."""

from typing import Any

from aiohttp import web

from gateway.answer_shapes import ModelBody, ModelListBody
from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound
from gateway.keys import STATE
from gateway.models.model_service import ModelService
from gateway.openapi import Operation


async def list_models(request: web.Request) -> web.Response:
    """Each name that a request may give: those of a model's aliases have it as their root."""
    state = request.app[STATE]
    shown = [
        _model_object(service, name, state.started_at_unix)
        for service in state.models.of(request[ACCOUNT])
        for name in service.options.names
    ]
    return web.json_response({"object": "list", "data": shown})


async def retrieve_model(request: web.Request) -> web.Response:
    state, name = request.app[STATE], request.match_info["id"]
    service = state.service(name, request[ACCOUNT])
    return web.json_response(_model_object(service, name, state.started_at_unix))


def _model_object(service: ModelService, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pagestream",
        "root": service.name,
        "parent": None,
        "max_model_len": service.limits(service.model).max_model_len if service.model else None,  # not loaded yet
    }


def routes() -> list[web.RouteDef]:
    # {id:.+}: names such as organisation/model hold slashes
    return [
        web.get(prefix + path, handler)
        for prefix in ("/v1", "")
        for path, handler in (("/models", list_models), ("/models/{id:.+}", retrieve_model))
    ]


OPERATIONS = tuple(
    operation
    for prefix in ("/v1", "")
    for operation in (
        Operation(method="GET", path=prefix + "/models", summary="The models served here", answer=ModelListBody),
        Operation(
            method="GET",
            path=prefix + "/models/{id:.+}",
            summary="One of them",
            answer=ModelBody,
            errors=(ModelNotFound,),
        ),
    )
)
