"""POST /v1/chat/completions, /v1/completions and /v1/messages: answers in OpenAI's words, or in Anthropic's.

/v1/messages/count_tokens tells how long a prompt is. /v1/embeddings is refused clearly, since clients ask for it beside
chat: a 404 would look like a wrong URL.

A chat's way in, behind the middlewares. It knows no field of a body: answers/answering.py has the order
of all that follows.
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
from gateway.answers.answer_kinds import CHAT, COMPLETION, MESSAGE
from gateway.answers.answering import answer
from gateway.errors import NotServed
from gateway.model_service import num_prompt_tokens
from gateway.openapi import INFERENCE_ERRORS, Operation, answering
from gateway.requests.anthropic_schema import MessagesBody, PromptFields, parse_count
from gateway.requests.openai_schema import ChatBody, CompletionBody, CompletionRequest
from gateway.requests.request_body import decode_body
from gateway.state import context_of, received_body


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
        "Embeddings are not served: the models here generate text. Point the client's embeddings at a server of an "
        "embedding model (text-embeddings-inference, or vLLM with --runner pooling) and keep this one for chat."
    )


OPERATIONS = (
    answering(
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a chat; with `stream` as events",
        body=ChatBody,
        answer=ChatCompletionBody,
    ),
    answering(
        "/v1/completions",
        create_completion,
        "Continue texts or token ids; with `stream` as events",
        body=CompletionBody,
        answer=TextCompletionBody,
    ),
    Operation("POST", "/v1/embeddings", refuse, "Not served here", answer=ErrorBody, status=NotServed.status),
    answering(
        "/v1/messages",
        create_message,
        "Answer a chat in Anthropic's words; with `stream` as events",
        body=MessagesBody,
        answer=AnthropicMessageBody,
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
