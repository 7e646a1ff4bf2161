"""The fields of a body of OpenAI's Responses API: the types are the validation, as in openai_schema.py. Pure."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.requests.generation_fields import SamplingFields
from gateway.requests.responses_items import ItemFields
from gateway.requests.responses_tools import ResponseToolChoice, ResponseTools
from shared.messages import MAX_LOGPROBS

_Items: TypeAlias = Annotated[list[ItemFields], Meta(min_length=1, max_length=4096)]
Input: TypeAlias = str | _Items
_MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]
_Metadata: TypeAlias = Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)]
_Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
# All but the logprobs are of tools that are not there, or of thoughts, which are told in the clear.
_Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextFields(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # there is none to leave out


class ResponsesBody(SamplingFields, kw_only=True):
    """null is the same as absent."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextFields | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None  # of tools that a server runs; there are none
    reasoning: ReasoningFields | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[_Include] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: _Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CountedBody(ResponsesBody, kw_only=True):
    """Of a count: all that a response is asked with, and without an input what came before is counted alone."""

    input: Input | None = None  # type: ignore[assignment]
