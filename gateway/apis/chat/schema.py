"""The body of a chat completion. Pure."""

from gateway.http.json_body import JsonBody
from gateway.pipeline.chat_request import ChatBody, chat_request
from gateway.pipeline.request import CompletionRequest, check_other_fields


def parse_chat(body: JsonBody) -> CompletionRequest:
    fields = body.typed(ChatBody)
    return chat_request(fields, check_other_fields(ChatBody, body.given))
