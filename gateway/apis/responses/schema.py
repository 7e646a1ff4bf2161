"""Bodies of OpenAI's Responses API, converted to CompletionRequest by way of an equivalent chat body. Pure.

Items become messages, `text.format` a response format, and flat tools those of a chat. Fields that would change the
answer and are not supported are refused, as in pipeline/request.py. A compaction (/v1/responses/compact) asks the model
to summarize the conversation.

    store         true by default, as at OpenAI: the answer is kept and can be read, continued, and deleted by its id
    background    generation continues without a reader

`previous_response_id` needs the store: such a body is parsed only after apis/responses/history.py has put the
earlier items into `input` and their number into EARLIER_ITEMS. A response repeats every field of its request with the
value in effect, because typed clients refuse a response that lacks one.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from gateway.apis.responses.body import Input, ResponsesBody, TextFields, messages_of
from gateway.apis.responses.tools import (
    ChatTools,
    ChosenTool,
    ResponseToolChoice,
    ToolReference,
    chat_tools,
    shown_tools,
)
from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.http.json_body import JsonBody
from gateway.pipeline.chat_request import ChatBody, MessageFields, request_in_words
from gateway.pipeline.fields import SamplingFields, template_kwargs
from gateway.pipeline.grammar import JsonSchemaFormat, ResponseFormatFields
from gateway.pipeline.request import NO_EFFECT, CompletionRequest, check_other_fields

_FORMAT_NAME = "response"  # default schema name, because OpenAI's clients read one
EARLIER_ITEMS = "earlier_items"  # in a stored body: number of items in `input` from earlier responses
_LOGPROBS = "message.output_text.logprobs"
MAX_SUMMARY_TOKENS = 1024  # default of max_output_tokens for a compaction: about one page
USER_ITEMS = "user_items"  # key of the user's items, which are returned beside the summary


def repeated(fields: ResponsesBody) -> dict[str, Any]:
    """Return the fields that the response repeats."""
    effort, summary = (fields.reasoning.effort, fields.reasoning.summary) if fields.reasoning else (None, None)
    return {
        "background": bool(fields.background),
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": fields.presence_penalty or 0.0,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": fields.temperature,  # None: the model's default, which the format fills in
        "text": _text(fields.text),
        "tool_choice": _tool_choice(fields.tool_choice),
        "tools": shown_tools(fields.tools or []),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _tool_choice(choice: ResponseToolChoice | None) -> str | dict[str, Any]:
    if not isinstance(choice, ChosenTool):
        return choice or "auto"
    if choice.type == "function":
        return _reference(choice)
    tools = [_reference(tool) for tool in choice.tools or ()]
    return {"type": choice.type, "mode": choice.mode or "auto", "tools": tools}


def _reference(tool: ToolReference) -> dict[str, Any]:
    return {"type": tool.type, "name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})


def _text(text: TextFields | None) -> dict[str, Any]:
    """Return `text` without null values, which OpenAI's schema allows only for `strict`."""
    if text is None or text.format is None:
        shown: dict[str, Any] = {"type": "text"}
    else:
        given = msgspec.to_builtins(text.format)
        known = given if given["type"] == "json_schema" else {"type": given["type"]}
        shown = {name: value for name, value in known.items() if value is not None}
    if shown["type"] == "json_schema":
        shown = {"name": _FORMAT_NAME, "strict": None, **shown}
    verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
    return {"format": shown, **verbosity}


_AS_IN_A_CHAT = (
    *(name for name in SamplingFields.__struct_fields__ if name not in ("detach_seconds", "chat_template_kwargs")),
    "model", "parallel_tool_calls", "stream",
)  # fmt: skip
# field -> values besides null that have no effect
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
    "logprobs": (False,),
}
# Field names in errors about the chat body -> the names in this API
_WORDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function.", "."),
    ("messages", "input"),
)


def parse_response(body: JsonBody) -> CompletionRequest:
    """Parse a body of /v1/responses; raise InvalidRequest."""
    fields = body.typed(ResponsesBody)
    check_history(fields.previous_response_id, body.given)
    ignored = check_other_fields(ResponsesBody, body.given, UNSUPPORTED, NO_EFFECT | {EARLIER_ITEMS})
    return response_request(fields, ignored)


def check_history(previous_response_id: str | None, given: Mapping[str, Any]) -> None:
    """Refuse previous_response_id unless the earlier items were added."""
    if previous_response_id and given.get(EARLIER_ITEMS) is None:
        raise UnsupportedParameter("previous_response_id: not supported here.", param="previous_response_id")


def response_request(
    fields: ResponsesBody, ignored: tuple[str, ...], more: Sequence[MessageFields] = ()
) -> CompletionRequest:
    """Convert the body, with `more` messages after those of the input; raise InvalidRequest."""
    _check(fields)
    messages = [*_messages(fields), *more]
    tools = chat_tools(fields.tools, fields.tool_choice)
    return structs.replace(
        request_in_words(_chat(fields, messages, tools), (*ignored, *tools.ignored), (*_tool_words(tools), *_WORDS)),
        prompt_param="input",
        max_tokens_param="max_output_tokens",
        background=bool(fields.background),
        repeated=repeated(fields),
    )


def _tool_words(tools: ChatTools) -> list[tuple[str, str]]:
    """Return the names of functions in errors whose index in the chat differs from the request."""
    indexes = ((f"tools[{index}]", path) for index, path in enumerate(tools.paths))
    return [(f"{index}.function", path) for index, path in indexes if index != path]


def _check(fields: ResponsesBody) -> None:
    if fields.background and fields.store is False:
        raise InvalidRequest("background: needs store: true, where the answer is read from.", param="background")
    if fields.truncation == "auto":
        raise UnsupportedParameter(
            "truncation: 'auto' is not supported; remove it or use 'disabled'.", param="truncation"
        )


def _messages(fields: ResponsesBody) -> list[MessageFields]:
    instructions = [MessageFields("system", fields.instructions)] if fields.instructions else []
    if isinstance(fields.input, str):
        return [*instructions, MessageFields("user", fields.input)]
    messages = messages_of(fields.input)
    if not messages:
        raise InvalidRequest("input: expected at least one message or function output.", param="input")
    return [*instructions, *messages]


def _chat(fields: ResponsesBody, messages: list[MessageFields], tools: ChatTools) -> ChatBody:
    detach_seconds = fields.detach_seconds
    if detach_seconds is None and fields.store is not False:
        detach_seconds = 0.0  # kept, but generation ends with the connection
    asks_logprobs = _LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    return ChatBody(
        messages=messages,
        max_tokens=fields.max_output_tokens,
        logprobs=asks_logprobs,
        top_logprobs=fields.top_logprobs if asks_logprobs else None,
        response_format=_response_format(fields.text),
        tools=tools.functions,
        tool_choice=tools.choice,
        chat_template_kwargs=template_kwargs(
            fields.reasoning.effort if fields.reasoning else None,
            fields.text.verbosity if fields.text else None,
            fields.chat_template_kwargs,
        ),
        detach_seconds=detach_seconds,
        **{name: getattr(fields, name) for name in _AS_IN_A_CHAT},
    )


def _response_format(text: TextFields | None) -> ResponseFormatFields | None:
    if text is None or text.format is None:
        return None
    asked = text.format
    schema = JsonSchemaFormat(name=asked.name, description=asked.description, schema=asked.schema, strict=asked.strict)
    return ResponseFormatFields(type=asked.type, json_schema=schema if asked.type == "json_schema" else None)


_ASK = (
    "Summarize our conversation so far for a person who will continue it and sees nothing else of it. Keep the "
    "questions, the decisions and their reasons, facts, names, numbers, tool results, and open tasks. Write only the "
    "summary."
)


class CompactionBody(msgspec.Struct, kw_only=True):
    """Body of /v1/responses/compact; null means absent."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    prompt_cache_key: str | None = None
    # Extensions to OpenAI's fields, as in a response.
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None


def parse_compaction(body: JsonBody) -> CompletionRequest:
    """Parse a body of /v1/responses/compact; raise InvalidRequest."""
    fields = body.typed(CompactionBody)
    check_history(fields.previous_response_id, body.given)
    if fields.input is None:
        raise MissingParameter("Missing required parameter: input.", param="input")
    no_effect = NO_EFFECT | {EARLIER_ITEMS, "prompt_cache_retention"}
    ignored = check_other_fields(CompactionBody, body.given, UNSUPPORTED, no_effect)
    asked = ResponsesBody(store=False, **{name: getattr(fields, name) for name in CompactionBody.__struct_fields__})
    request = response_request(asked, ignored, [MessageFields("user", _ASK)])
    return structs.replace(
        request, default_max_tokens=MAX_SUMMARY_TOKENS, repeated={USER_ITEMS: _user_items(body.given)}
    )


def _user_items(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the user's items of a validated body."""
    if isinstance(given["input"], str):
        return [{"role": "user", "content": given["input"]}]
    return [item for item in given["input"] if item.get("role") == "user"]
