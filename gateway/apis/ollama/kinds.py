"""The kinds of answers of Ollama's API."""

from collections.abc import Mapping
from typing import Any

from gateway.apis.ollama.format import ChatFormat, GenerateFormat
from gateway.apis.ollama.schema import GenerateBody, OllamaChatBody, model_name, parse_chat, parse_generate
from gateway.errors import InvalidRequest
from gateway.http.json_body import JsonBody
from gateway.pipeline.answer_kind import SOME_TEXT, AnswerKind, short_messages, stored_fields
from gateway.pipeline.context import RequestContext


async def with_checked_context(context: RequestContext, body: JsonBody) -> JsonBody:
    """Refuse a context length that the model does not have; raise InvalidRequest."""
    options, name = body.given.get("options"), body.given.get("model")
    num_ctx = options.get("num_ctx") if isinstance(options, Mapping) else None
    if isinstance(num_ctx, int) and isinstance(name, str):
        service = context.state.models.find(model_name(name), context.account)
        limit = service.limits(service.require_model()).max_model_len
        if num_ctx > limit:
            raise InvalidRequest(
                f"options.num_ctx: {num_ctx} exceeds the context length of this model, {limit} tokens.",
                param="options.num_ctx",
            )
    return body


def _short_prompt(prompt: str, given: Mapping[str, Any]) -> str:
    """Keep only that there is a prompt."""
    return SOME_TEXT


CHAT = AnswerKind(
    "ollama.chat",
    parse_chat,
    ChatFormat,
    stored_fields(OllamaChatBody),
    {"messages": short_messages},
    complete=with_checked_context,
)
GENERATE = AnswerKind(
    "ollama.generate",
    parse_generate,
    GenerateFormat,
    stored_fields(GenerateBody),
    {"prompt": _short_prompt},
    complete=with_checked_context,
)
