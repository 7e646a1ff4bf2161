"""The shapes of responses, for the API description; format.py and items.py write the bytes."""

from typing import Any, Literal

import msgspec


class CachedTokensBody(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokensBody(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsageBody(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokensBody
    output_tokens: int
    output_tokens_details: ReasoningTokensBody
    total_tokens: int


class ResponseErrorBody(msgspec.Struct, kw_only=True):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteBody(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class OutputItemBody(msgspec.Struct, kw_only=True):
    """An output item; further fields depend on `type`."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response; it also repeats fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    background: bool
    store: bool
    error: ResponseErrorBody | None
    incomplete_details: IncompleteBody | None
    instructions: str | None
    metadata: dict[str, str]
    output: list[OutputItemBody]
    parallel_tool_calls: bool
    previous_response_id: str | None
    frequency_penalty: float
    presence_penalty: float
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    usage: ResponseUsageBody | None


class DeletedResponseBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: bool


class InputTokensBody(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedItemBody(msgspec.Struct, kw_only=True):
    """An item of a compacted conversation; further fields depend on `type`."""

    id: str
    type: Literal["message", "compaction"]


class CompactedBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[CompactedItemBody]
    usage: ResponseUsageBody
