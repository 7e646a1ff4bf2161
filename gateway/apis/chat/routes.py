"""OpenAI's chat completions."""

from gateway.apis.chat.kinds import CHAT
from gateway.apis.chat.shapes import ChatCompletionBody
from gateway.pipeline.api import Api
from gateway.pipeline.chat_request import ChatBody
from gateway.pipeline.submit import generating

API = Api(
    operations=(
        generating(
            "/v1/chat/completions",
            CHAT,
            "Create a chat completion; with `stream`, as events",
            body=ChatBody,
            shape=ChatCompletionBody,
        ),
    ),
    kinds=(CHAT,),
)
