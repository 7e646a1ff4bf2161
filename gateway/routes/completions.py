"""POST /v1/completions: texts or token ids, one prompt or several."""

from aiohttp import web

from gateway.answer_shapes import TextCompletionBody
from gateway.answering import answer
from gateway.openai_response import CompletionFormat
from gateway.openai_schema import CompletionBody, parse_completion
from gateway.openapi import EVENTS, INFERENCE_ERRORS, Operation


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_completion, CompletionFormat)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/completions", create_completion)]


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue texts or token ids; with `stream` as events",
        body=CompletionBody,
        answer=TextCompletionBody,
        media=(EVENTS,),
        errors=INFERENCE_ERRORS,
    ),
)
