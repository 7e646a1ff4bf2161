"""POST /v1/chat/completions and /v1/completions: a chat's answer; texts or token ids, one prompt or several.

A chat's way in, behind the middlewares. It knows no field: answers/answering.py has the order of all that follows.
"""

from aiohttp import web

from gateway.answer_shapes import ChatCompletionBody, TextCompletionBody
from gateway.answers.answer_kinds import CHAT, COMPLETION
from gateway.answers.answering import answer
from gateway.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.requests.openai_schema import ChatBody, CompletionBody


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, CHAT)


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, COMPLETION)


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", create_chat_completion),
        web.post("/v1/completions", create_completion),
    ]


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a chat; with `stream` as events",
        body=ChatBody,
        answer=ChatCompletionBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
        parameters=KEEPING_PARAMETERS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue texts or token ids; with `stream` as events",
        body=CompletionBody,
        answer=TextCompletionBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
        parameters=KEEPING_PARAMETERS,
    ),
)
