"""The shapes of Ollama's answers, for the API description; format.py writes the bytes."""

from typing import Any, Literal

import msgspec


class OllamaErrorBody(msgspec.Struct, kw_only=True):
    error: str
    code: str


class _ReplyBody(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length"]
    prompt_eval_count: int
    eval_count: int


class ChatReplyBody(_ReplyBody, kw_only=True):
    message: dict[str, Any]


class GenerateReplyBody(_ReplyBody, kw_only=True):
    response: str


class OllamaModelBody(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModelsBody(msgspec.Struct, kw_only=True):
    models: list[OllamaModelBody]


class ShownModelBody(msgspec.Struct, kw_only=True):
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
