"""Anthropic's Messages API."""

from functools import partial

from aiohttp import web

from gateway.apis.anthropic.dialect import DIALECT
from gateway.apis.anthropic.kinds import MESSAGE
from gateway.apis.anthropic.schema import MessagesBody, PromptFields, parse_count
from gateway.apis.anthropic.shapes import AnthropicMessageBody, TokenCountBody
from gateway.http.body import received_body
from gateway.http.json_body import decode_body
from gateway.http.openapi import INFERENCE_ERRORS, Operation
from gateway.pipeline.api import Api
from gateway.pipeline.context import context_of
from gateway.pipeline.request import CompletionRequest
from gateway.pipeline.submit import generating, num_prompt_tokens


async def count_tokens(request: web.Request) -> web.Response:
    context = context_of(request)
    async with received_body(request) as body:
        count = partial(num_prompt_tokens, body, _count_of, context.state.models.to_read(context.account))
        return web.json_response({"input_tokens": await context.read(None, count)})


def _count_of(body: bytes) -> CompletionRequest:
    return parse_count(decode_body(body))


API = Api(
    operations=(
        generating(
            "/v1/messages",
            MESSAGE,
            "Create a message (Anthropic's API); with `stream`, as events",
            body=MessagesBody,
            shape=AnthropicMessageBody,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            count_tokens,
            "Count the tokens of a message request",
            body=PromptFields,
            answer=TokenCountBody,
            errors=INFERENCE_ERRORS,
            is_admitted=True,
        ),
    ),
    kinds=(MESSAGE,),
    dialect=DIALECT,
)
