"""Bodies of OpenAI's Responses API -> CompletionRequest, the same form that chats take. Pure.

Items become messages, `text.format` a response format, flat tools those of a chat; what would change the answer and is
not supported is refused, as in openai_schema.py. A compaction (/v1/responses/compact) has the model sum up the
conversation.

    store         true, as OpenAI's default: the answer is kept, and can be read, continued and deleted by its id
    background    it goes on without a reader

`previous_response_id` needs the store: a body that names one is read only when its items stand in `input` already,
which EARLIER_ITEMS says (answers/responses_history.py).

A response says again what was asked of it: every field is there, whether or not the request had it, with the value that
held, for typed clients refuse a response that lacks one. Only what this server has read is repeated.

A response's way in, where its body is checked. It knows no tokens, no store and no format of answers.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from gateway.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from gateway.requests.generation_fields import SamplingFields
from gateway.requests.grammar_fields import JsonSchemaFormat, ResponseFormatFields
from gateway.requests.openai_schema import (
    NO_EFFECT,
    ChatBody,
    CompletionRequest,
    MessageFields,
    check_other_fields,
    request_in_words,
)
from gateway.requests.request_body import JsonBody
from gateway.requests.responses_body import (
    ChosenTool,
    Input,
    ResponsesBody,
    ResponseToolChoice,
    TextFields,
    chat_tools,
    messages_of,
)
from shared.messages import SamplingParams

_FORMAT_NAME = "response"  # of a schema whose request did not name it: OpenAI's clients read one
EARLIER_ITEMS = "earlier_items"  # in a stored body: how many of `input` are those of earlier responses
_LOGPROBS = "message.output_text.logprobs"
MAX_SUMMARY_TOKENS = 1024  # unless a request says more: a page, for a conversation of many
USER_ITEMS = "user_items"  # of what is repeated: they stand beside the summary


def repeated(fields: ResponsesBody) -> dict[str, Any]:
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
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": _text(fields.text),
        "tool_choice": _tool_choice(fields.tool_choice),
        "tools": msgspec.to_builtins(fields.tools or []),  # `strict` is null where the request leaves it open
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def with_what_held(said: Mapping[str, Any], fields: SamplingFields, sampling: SamplingParams) -> dict[str, Any]:
    """`said`: of repeated(), or nothing. What the request left open is as the engine was told: a model has defaults."""
    named = {name: getattr(fields, name) for name in ("temperature", "top_p") if name in said}
    return {**said, **{name: getattr(sampling, name) if value is None else value for name, value in named.items()}}


def _tool_choice(choice: ResponseToolChoice | None) -> str | dict[str, Any]:
    if not isinstance(choice, ChosenTool):
        return choice or "auto"
    if choice.type == "function":
        return {"type": choice.type, "name": choice.name}
    tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or ()]
    return {"type": choice.type, "mode": choice.mode or "auto", "tools": tools}


def _text(text: TextFields | None) -> dict[str, Any]:
    """Null is left out: OpenAI's schema has none here but for `strict`."""
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


def parse_response(body: JsonBody) -> CompletionRequest:
    """Raises InvalidRequest."""
    fields = body.typed(ResponsesBody)
    check_history(fields.previous_response_id, body.given)
    ignored = check_other_fields(ResponsesBody, body.given, UNSUPPORTED, NO_EFFECT | {EARLIER_ITEMS})
    return response_request(fields, ignored)


def check_history(previous_response_id: str | None, given: Mapping[str, Any]) -> None:
    if previous_response_id and given.get(EARLIER_ITEMS) is None:
        raise UnsupportedParameter("previous_response_id: not supported here.", param="previous_response_id")


def response_request(
    fields: ResponsesBody, ignored: tuple[str, ...], more: Sequence[MessageFields] = ()
) -> CompletionRequest:
    """`more`: messages behind those of the input. Raises InvalidRequest."""
    _check(fields)
    messages = [*_messages(fields), *more]
    return structs.replace(
        request_in_words(_chat(fields, messages), ignored, _WORDS),
        prompt_param="input",
        max_tokens_param="max_output_tokens",
        background=bool(fields.background),
        repeated=repeated(fields),
    )


def _check(fields: ResponsesBody) -> None:
    if fields.background and fields.store is False:
        raise InvalidRequest("background: only with store, which is where the answer is read from.", param="background")
    if fields.truncation == "auto":
        raise UnsupportedParameter(
            "truncation: not supported by this server; leave it out, or 'disabled'.", param="truncation"
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


_ASK = (
    "Sum up our conversation so far for somebody who goes on with it and sees nothing else of it. Keep what was asked, "
    "what was decided and why, facts, names, numbers and results of tools, and what is still to be done. Write the "
    "summary alone."
)


class CompactionBody(msgspec.Struct, kw_only=True):
    """null is the same as absent."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's, as in a response.
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None
    queue_timeout_seconds: Annotated[float, Meta(gt=0.0)] | None = None


def parse_compaction(body: JsonBody) -> CompletionRequest:
    """Raises InvalidRequest."""
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
    """The items of a checked body that the user said."""
    if isinstance(given["input"], str):
        return [{"role": "user", "content": given["input"]}]
    return [item for item in given["input"] if item.get("role") == "user"]
