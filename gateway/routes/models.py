"""GET /v1/models and /v1/models/{id}; also without /v1, where some clients look."""

from typing import Any

from aiohttp import web

from gateway.answer_shapes import ModelBody, ModelListBody
from gateway.errors import ModelNotFound
from gateway.keys import STATE
from gateway.openapi import Operation
from gateway.state import GatewayState


async def list_models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model_object(request.app[STATE])]})


async def retrieve_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.check_model_name(request.match_info["id"])
    return web.json_response(_model_object(state))


def _model_object(state: GatewayState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started_at_unix,
        "owned_by": "pagestream",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.limits(state.model).max_model_len if state.model else None,  # null: not loaded yet
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
