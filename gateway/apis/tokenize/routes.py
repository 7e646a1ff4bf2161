"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's format; also under /v1.

/tokenizer_info needs a key like all routes but the probes. It shows the model's files only, no paths or settings.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web

from gateway.apis.tokenize.shapes import DetokenizedBody, TokenizedBody, TokenizerInfoBody
from gateway.auth.access import ACCOUNT
from gateway.errors import InvalidRequest, MissingParameter, ModelNotFound, Unavailable
from gateway.http.body import received_body
from gateway.http.json_body import decode_body
from gateway.http.openapi import Operation, Parameter
from gateway.http.state import STATE
from gateway.model_service import ReadModel, find_model
from gateway.pipeline.api import Api
from gateway.pipeline.chat_request import Messages, chat_prompt
from gateway.pipeline.context import context_of
from gateway.pipeline.plan import encode_prompt
from gateway.pipeline.request import Prompt
from gateway.text.chat_template import TemplateOptions


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(max_length=1_000_000)]


async def tokenize(request: web.Request) -> web.Response:
    return await _worked(request, _tokenized)


async def detokenize(request: web.Request) -> web.Response:
    return await _worked(request, _detokenized)


async def _worked(request: web.Request, work: Callable[[bytes, Sequence[ReadModel]], bytes]) -> web.Response:
    """Answer with the JSON that `work` makes of the body."""
    context = context_of(request)
    async with received_body(request) as body:
        # Ten times the bytes, because converting a token id takes longer than parsing it.
        answer = await context.read(10 * len(body), partial(work, body, context.state.models.to_read(context.account)))
    return web.Response(body=answer, content_type="application/json")


def _tokenized(body: bytes, models: Sequence[ReadModel]) -> bytes:
    fields = decode_body(body).typed(TokenizeBody)
    model, limits = find_model(models, fields.model).require()
    prompt, param, add_by_default, template = _prompt(fields)
    add_special_tokens = add_by_default if fields.add_special_tokens is None else fields.add_special_tokens
    tokens = encode_prompt(model, limits, prompt, param, add_special_tokens, template)
    return msgspec.json.encode({
        "count": len(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": tokens,
        "token_strs": model.encoder.token_strings(tokens) if fields.return_token_strs else None,
    })  # fmt: skip


def _detokenized(body: bytes, models: Sequence[ReadModel]) -> bytes:
    fields = decode_body(body, ids="tokens").typed(DetokenizeBody)
    model, _ = find_model(models, fields.model).require()
    if fields.tokens and max(fields.tokens) >= model.vocab_size:
        raise InvalidRequest(
            f"tokens: {max(fields.tokens)} is not a token id; expected 0..{model.vocab_size - 1}.", param="tokens"
        )
    return msgspec.json.encode({"prompt": model.encoder.decode(fields.tokens, skip_special_tokens=False)})


def _prompt(body: TokenizeBody) -> tuple[Prompt, str, bool, TemplateOptions | None]:
    if body.prompt is not None and body.messages is not None:
        raise InvalidRequest("prompt: set either prompt or messages, not both.", param="prompt")
    if body.messages is not None:
        messages, template = chat_prompt(body.messages, body.add_generation_prompt, body.continue_final_message)
        return messages, "messages", False, template
    if body.prompt is None:
        raise MissingParameter("Missing required parameter: prompt or messages.", param="prompt")
    return body.prompt, "prompt", True, None


async def tokenizer_info(request: web.Request) -> web.Response:
    model = request.app[STATE].models.find(request.query.get("model"), request[ACCOUNT]).require_model()
    return web.json_response(model.tokenizer_info)


_OPERATIONS = (
    Operation(
        "POST",
        "/tokenize",
        tokenize,
        "Convert a prompt or messages to token ids",
        body=TokenizeBody,
        answer=TokenizedBody,
        errors=(ModelNotFound, Unavailable),
        is_admitted=True,
    ),
    Operation(
        "POST",
        "/detokenize",
        detokenize,
        "Convert token ids to text",
        body=DetokenizeBody,
        answer=DetokenizedBody,
        errors=(ModelNotFound, Unavailable),
        is_admitted=True,
    ),
    Operation(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "Special tokens and chat template of a model",
        answer=TokenizerInfoBody,
        errors=(InvalidRequest, ModelNotFound, Unavailable),
        parameters=(Parameter(name="model", where="query", description="Required if several models are served"),),
    ),
)
API = Api(operations=tuple(operation.below(prefix) for prefix in ("", "/v1") for operation in _OPERATIONS))
