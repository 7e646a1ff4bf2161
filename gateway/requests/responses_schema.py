"""Bodies of OpenAI's Responses API -> CompletionRequest, the same form that chats take. Pure.

Items become messages, `text.format` a response format, flat tools those of a chat; what would change the answer and is
not supported is refused, as in openai_schema.py. What the answer repeats of its request is made here, once.

    store         true, as OpenAI's default: the answer is kept, and can be read, continued and deleted by its id
    background    it goes on without a reader

`previous_response_id` needs the store: a body that names one is read only when its items stand in `input` already,
which EARLIER_ITEMS says (answers/responses_history.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.requests.grammar_fields import JsonSchemaFormat, ResponseFormatFields
from gateway.requests.openai_schema import (
    ChatBody,
    CompletionRequest,
    MessageFields,
    StopString,
    chat_request,
    check_other_fields,
)
from gateway.requests.request_body import decode_body
from gateway.requests.responses_items import ItemFields, messages_of
from gateway.requests.responses_tools import ResponseToolChoice, ResponseTools, chat_tools
from shared.messages import MAX_LOGPROBS

EARLIER_ITEMS = "earlier_items"  # in a stored body: how many of `input` are those of earlier responses
_LOGPROBS = "message.output_text.logprobs"

_Items: TypeAlias = Annotated[list[ItemFields], Meta(min_length=1, max_length=4096)]
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


class ResponsesBody(msgspec.Struct, kw_only=True):
    """null is the same as absent."""

    model: str | None = None
    input: str | _Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
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
    # Beyond OpenAI's, as in a chat.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    detach_seconds: Annotated[float, Meta(ge=0.0)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None


_AS_IN_A_CHAT = (
    "model", "temperature", "top_p", "parallel_tool_calls", "stream", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop", "ignore_eos", "cache_salt", "priority",
    "timeout_seconds", "queue_timeout_seconds",
)  # fmt: skip
# field -> the values at which it changes nothing, null aside
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
    "logprobs": (False,),
}
# What is said of a chat's fields -> of the same ones here
_WORDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function.", "."),
    ("messages", "input"),
)


def parse_response(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest."""
    fields, given = decode_body(body, ResponsesBody)
    num_earlier = given.pop(EARLIER_ITEMS, None)
    if fields.previous_response_id and num_earlier is None:
        raise UnsupportedParameter("previous_response_id: not supported here.", param="previous_response_id")
    ignored = check_other_fields(ResponsesBody, given, UNSUPPORTED)
    _check(fields)
    messages = _messages(fields)
    try:
        request = chat_request(_chat(fields, messages), ignored, include_usage=bool(fields.stream))
    except InvalidRequest as error:
        param = error.param and _worded(error.param)
        raise type(error)(_worded(error.message), param=param, code=error.code) from error
    grammar = request.grammar and replace(request.grammar, param=_worded(request.grammar.param))
    return replace(
        request,
        prompt_param="input",
        max_tokens_param="max_output_tokens",
        grammar=grammar,
        background=bool(fields.background),
        repeated=_repeated(fields, given),
    )


def _check(fields: ResponsesBody) -> None:
    if fields.background and fields.store is False:
        raise InvalidRequest("background: only with store, which is where the answer is read from.", param="background")
    if fields.truncation == "auto":
        raise UnsupportedParameter(
            "truncation: not supported by this server; leave it out, or 'disabled'.", param="truncation"
        )
    if fields.reasoning is not None and fields.reasoning.summary not in (None, "auto"):
        param = "reasoning.summary"
        raise UnsupportedParameter(
            f"{param}: this server tells thoughts as they are; leave it out, or 'auto'.", param=param
        )
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        raise UnsupportedParameter(
            "text.verbosity: not supported by this server; leave it out, or 'medium'.", param="text.verbosity"
        )


def _messages(fields: ResponsesBody) -> list[MessageFields]:
    instructions = [MessageFields("system", fields.instructions)] if fields.instructions else []
    if isinstance(fields.input, str):
        return [*instructions, MessageFields("user", fields.input)]
    messages = messages_of(fields.input)
    if not messages:
        raise InvalidRequest("input: expected a message, or a function's output.", param="input")
    return [*instructions, *messages]


def _chat(fields: ResponsesBody, messages: list[MessageFields]) -> ChatBody:
    tools, choice = chat_tools(fields.tools, fields.tool_choice)
    detach_seconds = fields.detach_seconds
    if detach_seconds is None and fields.store is not False:
        detach_seconds = 0.0  # kept, but not beyond its connection
    asks_logprobs = _LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    return ChatBody(
        messages=messages,
        max_tokens=fields.max_output_tokens,
        logprobs=asks_logprobs,
        top_logprobs=fields.top_logprobs if asks_logprobs else None,
        response_format=_response_format(fields.text),
        tools=tools,
        tool_choice=choice,
        chat_template_kwargs=_template_kwargs(fields),
        detach_seconds=detach_seconds,
        **{name: getattr(fields, name) for name in _AS_IN_A_CHAT},
    )


def _response_format(text: TextFields | None) -> ResponseFormatFields | None:
    if text is None or text.format is None:
        return None
    asked = text.format
    schema = JsonSchemaFormat(name=asked.name, description=asked.description, schema=asked.schema, strict=asked.strict)
    return ResponseFormatFields(type=asked.type, json_schema=schema if asked.type == "json_schema" else None)


def _template_kwargs(fields: ResponsesBody) -> dict[str, Any]:
    """Templates that know of effort take it by this name; those whose models can leave out thinking by the other."""
    effort = fields.reasoning.effort if fields.reasoning else None
    thinking: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        thinking["enable_thinking"] = False
    return thinking | (fields.chat_template_kwargs or {})


def _repeated(fields: ResponsesBody, given: Mapping[str, Any]) -> dict[str, Any]:
    effort, summary = (fields.reasoning.effort, fields.reasoning.summary) if fields.reasoning else (None, None)
    return {
        "background": bool(fields.background),
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"}, **_present(given.get("text"))},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _present(value: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: item for name, item in (value or {}).items() if item is not None}


def _worded(said: str) -> str:
    for chats, ours in _WORDS:
        said = said.replace(chats, ours)
    return said
