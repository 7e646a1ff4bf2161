"""Anthropic's request bodies -> CompletionRequest, the same form that OpenAI's take. Pure.

Text in and out. Roles, blocks and stop sequences are said in the words of a chat; what would change the answer and is
not supported is refused, as in openai_schema.py. A `system` text is the chat's first message.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.requests.openai_schema import (
    ChatBody,
    CompletionRequest,
    ContentPart,
    MessageFields,
    StopString,
    chat_request,
    check_other_fields,
)
from gateway.requests.request_body import decode_body

System: TypeAlias = str | list[ContentPart]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[ContentPart]


class PromptFields(msgspec.Struct, kw_only=True):
    """What is counted; null is the same as absent."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    system: System | None = None


class MessagesBody(PromptFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=4)] | None = None
    stream: bool | None = None


# field -> the values at which it changes nothing, null aside
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
}


def parse_messages(body: bytes) -> CompletionRequest:
    fields, given = decode_body(body, MessagesBody)
    ignored = check_other_fields(MessagesBody, given, UNSUPPORTED)
    request = chat_request(
        ChatBody(
            model=fields.model,
            messages=_chat_messages(fields),
            max_tokens=fields.max_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            stop=fields.stop_sequences,
            stream=fields.stream,
            continue_final_message=_is_begun(fields),
        ),
        ignored,
        include_usage=bool(fields.stream),
    )
    return replace(request, is_chat=False)  # its text is not read for calls and thoughts


def parse_count(body: bytes) -> CompletionRequest:
    """Of /v1/messages/count_tokens: the prompt alone."""
    fields, given = decode_body(body, PromptFields)
    check_other_fields(MessagesBody, given, {})
    chat = ChatBody(model=fields.model, messages=_chat_messages(fields), continue_final_message=_is_begun(fields))
    return chat_request(chat, ())


def _is_begun(fields: PromptFields) -> bool:
    """An assistant's last message is the beginning of the answer."""
    return fields.messages[-1].role == "assistant"


def _chat_messages(fields: PromptFields) -> list[MessageFields]:
    system = [MessageFields("system", fields.system)] if fields.system else []
    return [*system, *(MessageFields(message.role, message.content) for message in fields.messages)]
