"""The shapes of chat answers, for the API description; format.py writes the bytes."""

from typing import Any, Literal

import msgspec

from gateway.pipeline.usage_shapes import UsageBody


class CalledFunctionBody(msgspec.Struct, kw_only=True):
    name: str
    arguments: str  # JSON as text


class ToolCallBody(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunctionBody


class ChatMessageBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str = ""  # only if there is reasoning
    reasoning_content: str = ""  # the same text under its older name
    tool_calls: list[ToolCallBody] = []  # only if there are calls


class ChatChoiceBody(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageBody
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletionBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str  # of the model's files and the release
    choices: list[ChatChoiceBody]
    usage: UsageBody
    prompt_logprobs: list[Any] | None  # null unless requested
    prompt_token_ids: list[int] | None
