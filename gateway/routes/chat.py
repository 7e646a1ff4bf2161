"""POST /v1/chat/completions."""

from aiohttp import web

from gateway.answer_shapes import ChatCompletionBody
from gateway.answers.answer_kinds import CHAT
from gateway.answers.answering import answer
from gateway.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.requests.openai_schema import ChatBody


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, CHAT)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/chat/completions", create_chat_completion)]


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
)
