"""GET /v1/models and /v1/models/{id}; also without /v1, where some clients look. Anthropic's clients, which send
`anthropic-version`, are answered in their own shape.

Beside the walks. It knows no request but its own.
"""

from typing import Any

from aiohttp import web

from gateway.answer_shapes import ModelBody, ModelListBody
from gateway.answers.anthropic_models import model_info, models_page
from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound
from gateway.http.anthropic_dialect import speaks_anthropic
from gateway.models.model_service import ModelService
from gateway.openapi import Operation
from gateway.state import STATE


async def list_models(request: web.Request) -> web.Response:
    """Each name that a request may give: those of a model's aliases have it as their root."""
    state = request.app[STATE]
    named = [(service, name) for service in state.models.of(request[ACCOUNT]) for name in service.options.names]
    shown = [_shown(request, service, name) for service, name in named]
    if speaks_anthropic(request):
        return web.json_response(models_page(shown, request.query))
    return web.json_response({"object": "list", "data": shown})


async def retrieve_model(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    return web.json_response(_shown(request, request.app[STATE].service(name, request[ACCOUNT]), name))


def _shown(request: web.Request, service: ModelService, name: str) -> dict[str, Any]:
    started_at = request.app[STATE].started_at_unix
    max_model_len = service.limits(service.model).max_model_len if service.model else None  # not loaded yet
    if speaks_anthropic(request):
        return model_info(name, started_at, max_model_len)
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


_OPERATIONS = (
    Operation("GET", "/models", list_models, "The models served here", answer=ModelListBody),
    # {id:.+}: names such as organisation/model hold slashes
    Operation("GET", "/models/{id:.+}", retrieve_model, "One of them", answer=ModelBody, errors=(ModelNotFound,)),
)
OPERATIONS = tuple(operation.below(prefix) for prefix in ("/v1", "") for operation in _OPERATIONS)
