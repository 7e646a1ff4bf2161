"""The shapes of answers, for the API description only; the formats in gateway/apis write the actual bytes.

Schemathesis checks real answers against them: additional fields are allowed, missing or different ones are not.
"""

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


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None  # the invalid field, such as messages[0].role
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The shape of every error."""

    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class UsageBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # only if reasoning is counted separately


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


class TextChoiceBody(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletionBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str  # of the model's files and the release
    choices: list[TextChoiceBody]
    usage: UsageBody


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


class ModelBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None  # null: not loaded yet
    generation_defaults: dict[str, float] = {}  # from generation_config.json, if it has any


class ModelListBody(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[ModelBody]


class TokenizedBody(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfoBody(msgspec.Struct, kw_only=True):
    """Tokenizer settings; it also has other fields of tokenizer_config.json."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    added_tokens_decoder: dict[str, str]


class DetokenizedBody(msgspec.Struct, kw_only=True):
    prompt: str


class StateBody(msgspec.Struct, kw_only=True):
    state: str


class ReadinessBody(StateBody, kw_only=True):
    phase: str
    progress: float
    detail: str
    elapsed_s: float
    workers: list[dict[str, Any]]
    models: dict[str, str]  # name -> state


class StoreReadinessBody(StateBody, kw_only=True):
    store_write_seconds: float | None  # null: the write failed
    ready_workers: int
    ready_models: int  # those that take requests
    models: int


class VersionBody(msgspec.Struct, kw_only=True):
    version: str
