"""POST /v1/chat/completions, /v1/completions, and /v1/messages: answers in OpenAI's or Anthropic's format.

/v1/messages/count_tokens counts the tokens of a prompt. /v1/embeddings is refused with 501, because a 404 would look
like a wrong URL.
"""

from functools import partial
from typing import NoReturn

from aiohttp import web

from gateway.answer_shapes import (
    AnthropicMessageBody,
    ChatCompletionBody,
    ErrorBody,
    TextCompletionBody,
    TokenCountBody,
)
from gateway.apis.anthropic.kinds import MESSAGE
from gateway.apis.anthropic.schema import MessagesBody, PromptFields, parse_count
from gateway.apis.chat.kinds import CHAT, COMPLETION
from gateway.errors import NotServed
from gateway.http.body import received_body
from gateway.http.json_body import decode_body
from gateway.http.openapi import INFERENCE_ERRORS, Operation, answering
from gateway.pipeline.context import context_of
from gateway.pipeline.request import ChatBody, CompletionBody, CompletionRequest
from gateway.pipeline.submit import answer, num_prompt_tokens


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, CHAT)


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, COMPLETION)


async def create_message(request: web.Request) -> web.StreamResponse:
    return await answer(request, MESSAGE)


async def count_tokens(request: web.Request) -> web.Response:
    context = context_of(request)
    async with received_body(request) as body:
        count = partial(num_prompt_tokens, body, _count_of, context.state.models.to_read(context.account))
        return web.json_response({"input_tokens": await context.read(None, count)})


def _count_of(body: bytes) -> CompletionRequest:
    return parse_count(decode_body(body))


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed(
        "Embeddings are not supported: the models here generate text. Configure the client to send embeddings to a "
        "server of an embedding model, such as text-embeddings-inference or vLLM with --runner pooling."
    )


OPERATIONS = (
    answering(
        "/v1/chat/completions",
        create_chat_completion,
        "Create a chat completion; with `stream`, as events",
        body=ChatBody,
        answer=ChatCompletionBody,
    ),
    answering(
        "/v1/completions",
        create_completion,
        "Complete texts or token ids; with `stream`, as events",
        body=CompletionBody,
        answer=TextCompletionBody,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        refuse,
        "Not supported",
        answer=ErrorBody,
        status=NotServed.status,
        uncharged="refused without reading the body",
    ),
    answering(
        "/v1/messages",
        create_message,
        "Create a message (Anthropic's API); with `stream`, as events",
        body=MessagesBody,
        answer=AnthropicMessageBody,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a message request",
        body=PromptFields,
        answer=TokenCountBody,
        errors=INFERENCE_ERRORS,
    ),
)
