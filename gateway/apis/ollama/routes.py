"""Ollama's API: /api/chat, /api/generate, and the models. Models are not pulled, created, or embedded with here."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import NoReturn

import msgspec
from aiohttp import web

from gateway.apis.ollama.format import error_object
from gateway.apis.ollama.kinds import CHAT, GENERATE
from gateway.apis.ollama.schema import GenerateBody, OllamaChatBody, model_name
from gateway.apis.ollama.shapes import (
    ChatReplyBody,
    GenerateReplyBody,
    OllamaErrorBody,
    OllamaModelsBody,
    ShownModelBody,
)
from gateway.auth.access import ACCOUNT
from gateway.errors import ModelNotFound, NotServed, Unavailable
from gateway.http import admin
from gateway.http.body import received_body
from gateway.http.dialect import Dialect
from gateway.http.json_body import decode_body
from gateway.http.openapi import Operation
from gateway.http.shapes import VersionBody
from gateway.http.state import STATE
from gateway.pipeline.api import Api
from gateway.pipeline.context import context_of
from gateway.pipeline.submit import generating

LINES = "application/x-ndjson"
# Clients expect these fields; a gateway reads a model's tokenizer only.
_DETAILS = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


class ShowBody(msgspec.Struct, kw_only=True):
    model: str


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    started_at = datetime.fromtimestamp(state.started_at_unix, UTC).isoformat()
    shown = [
        {"name": name, "model": name, "modified_at": started_at, "size": 0, "digest": "", "details": _DETAILS}
        for service in state.models.of(request[ACCOUNT])
        for name in service.options.names
    ]
    return web.json_response({"models": shown})


async def show_model(request: web.Request) -> web.Response:
    context = context_of(request)
    async with received_body(request) as data:
        body = await context.read(len(data), partial(decode_body, data))
    name = model_name(body.typed(ShowBody).model)
    service = context.state.models.find(name, context.account)
    model = service.require_model()
    capabilities = ["completion", *(["tools"] if model.encoder.template_source else [])]
    capabilities += ["thinking"] if model.reasoning is not None else []
    return web.json_response(
        {
            "template": model.encoder.template_source,
            "details": _DETAILS,
            "model_info": {"general.basename": name, "context_length": service.limits(model).max_model_len},
            "capabilities": capabilities,
        }
    )


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed("Models are chosen when this server starts (--model, --models-file), and they only generate text.")


_REASON = "names from memory"
_OPERATIONS = (
    generating(
        "/api/chat", CHAT, "Chat, in Ollama's format; unless `stream` is false, as lines of JSON",
        body=OllamaChatBody, shape=ChatReplyBody, media=(LINES,),
    ),
    generating(
        "/api/generate", GENERATE, "Complete a prompt, in Ollama's format",
        body=GenerateBody, shape=GenerateReplyBody, media=(LINES,),
    ),
    Operation(
        "POST", "/api/show", show_model, "Show a model, in Ollama's format",
        body=ShowBody, answer=ShownModelBody, errors=(ModelNotFound, Unavailable),
    ),
    Operation("GET", "/api/tags", list_models, "List the models", answer=OllamaModelsBody, uncharged=_REASON),
    Operation("GET", "/api/ps", list_models, "List the loaded models", answer=OllamaModelsBody, uncharged=_REASON),
    Operation(
        "GET", "/api/version", admin.show_version, "Version of this gateway", answer=VersionBody, uncharged=_REASON
    ),
    *(
        Operation(
            method, f"/api/{name}", refuse, "Not supported",
            answer=OllamaErrorBody, status=NotServed.status, uncharged="refused without reading the body",
        )
        for method, name in (
            ("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"),
            ("POST", "embed"), ("POST", "embeddings"),
        )
    ),
)  # fmt: skip
API = Api(
    operations=tuple(replace(operation, error_body=OllamaErrorBody) for operation in _OPERATIONS),
    kinds=(CHAT, GENERATE),
    dialect=Dialect(paths=("/api/",), error=lambda error, request_id: error_object(error)),
)
