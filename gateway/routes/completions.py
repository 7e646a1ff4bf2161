"""POST /v1/completions: texts or token ids, one prompt or several."""

from aiohttp import web

from gateway.answer_shapes import TextCompletionBody
from gateway.answers.answer_kinds import COMPLETION
from gateway.answers.answering import answer
from gateway.openapi import EVENTS, INFERENCE_ERRORS, KEEPING_PARAMETERS, Operation
from gateway.requests.openai_schema import CompletionBody


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, COMPLETION)


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
        parameters=KEEPING_PARAMETERS,
    ),
)
