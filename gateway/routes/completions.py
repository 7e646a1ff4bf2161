"""POST /v1/completions: texts or token ids, one prompt or several."""

from aiohttp import web

from gateway.answering import answer
from gateway.openai_response import CompletionFormat
from gateway.openai_schema import parse_completion


async def create_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_completion, CompletionFormat)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/completions", create_completion)]
