"""The shapes of messages, for the API description; format.py writes the bytes."""

from typing import Any, Literal

import msgspec


class TextBlockBody(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlockBody(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlockBody(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsageBody(msgspec.Struct, kw_only=True):
    input_tokens: int  # without cached ones
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessageBody(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockBody | ThinkingBlockBody | ToolUseBlockBody]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsageBody


class TokenCountBody(msgspec.Struct, kw_only=True):
    input_tokens: int
