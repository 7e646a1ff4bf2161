"""POST /v1/chat/completions."""

from aiohttp import web

from gateway.answering import answer
from gateway.openai_response import ChatFormat
from gateway.openai_schema import parse_chat


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_chat, ChatFormat)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/chat/completions", create_chat_completion)]
