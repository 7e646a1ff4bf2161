"""POST /v1/chat/completions and /v1/completions: a chat's answer; texts or token ids, one prompt or several.
/v1/embeddings is refused clearly, since clients ask for it beside chat: a 404 would look like a wrong URL.

A chat's way in, behind the middlewares. It knows no field: answers/answering.py has the order of all that follows.
"""

from typing import NoReturn

from aiohttp import web

from gateway.answer_shapes import ChatCompletionBody, ErrorBody, TextCompletionBody
from gateway.answers.answer_kinds import CHAT, COMPLETION
from gateway.answers.answering import answer
from gateway.errors import NotServed
from gateway.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.requests.openai_schema import ChatBody, CompletionBody


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, CHAT)


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, COMPLETION)


async def refuse(request: web.Request) -> NoReturn:
    raise NotServed(
        "Embeddings are not served: the models here generate text. Point the client's embeddings at a server of an "
        "embedding model (text-embeddings-inference, or vLLM with --runner pooling) and keep this one for chat."
    )


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a chat; with `stream` as events",
        body=ChatBody,
        answer=ChatCompletionBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
        parameters=KEEPING_PARAMETERS,
    ),
    Operation(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue texts or token ids; with `stream` as events",
        body=CompletionBody,
        answer=TextCompletionBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
        parameters=KEEPING_PARAMETERS,
    ),
    Operation("POST", "/v1/embeddings", refuse, "Not served here", answer=ErrorBody, status=NotServed.status),
)
