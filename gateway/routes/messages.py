"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, of the same engine.

A message's way in, behind the middlewares. It knows no block of content.
"""

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from gateway.answer_shapes import AnthropicMessageBody, TokenCountBody
from gateway.answers.answer_kinds import MESSAGE
from gateway.answers.answering import answer
from gateway.auth.access import ACCOUNT
from gateway.models.model_service import ReadModel, find_model
from gateway.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.requests.anthropic_schema import MessagesBody, PromptFields, parse_count
from gateway.requests.planning import encode_prompts
from gateway.requests.request_body import decode_body
from gateway.state import STATE, read_body


async def create_message(request: web.Request) -> web.StreamResponse:
    return await answer(request, MESSAGE)


async def count_tokens(request: web.Request) -> web.Response:
    state, account = request.app[STATE], request[ACCOUNT]
    body = await read_body(request, state.settings.body_timeout_seconds)
    count = partial(_counted, body, state.models.to_read(account))
    return web.json_response({"input_tokens": await state.read(account, None, count)})


def _counted(body: bytes, models: Sequence[ReadModel]) -> int:
    counted = parse_count(decode_body(body))
    model, limits = find_model(models, counted.model).require()
    (token_ids,) = encode_prompts(model, limits, counted)
    return len(token_ids)


OPERATIONS = (
    Operation(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a chat in Anthropic's words; with `stream` as events",
        body=MessagesBody,
        answer=AnthropicMessageBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
        parameters=KEEPING_PARAMETERS,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "How many tokens such a chat has",
        body=PromptFields,
        answer=TokenCountBody,
        errors=INFERENCE_ERRORS,
    ),
)
