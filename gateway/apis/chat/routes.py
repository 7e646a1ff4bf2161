"""OpenAI's chat completions."""

from aiohttp import web

from gateway.apis.chat.kinds import CHAT
from gateway.apis.chat.shapes import ChatCompletionBody
from gateway.http.openapi import answering
from gateway.pipeline.api import Api
from gateway.pipeline.chat_request import ChatBody
from gateway.pipeline.submit import answer


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, CHAT)


API = Api(
    operations=(
        answering(
            "/v1/chat/completions",
            create_chat_completion,
            "Create a chat completion; with `stream`, as events",
            body=ChatBody,
            answer=ChatCompletionBody,
        ),
    ),
    kinds=(CHAT,),
)
