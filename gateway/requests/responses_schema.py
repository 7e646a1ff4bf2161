"""Bodies of OpenAI's Responses API -> CompletionRequest, the same form that chats take. Pure.

Items become messages, `text.format` a response format, flat tools those of a chat; what would change the answer and is
not supported is refused, as in openai_schema.py.

    store         true, as OpenAI's default: the answer is kept, and can be read, continued and deleted by its id
    background    it goes on without a reader

`previous_response_id` needs the store: a body that names one is read only when its items stand in `input` already,
which EARLIER_ITEMS says (answers/responses_history.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.requests.generation_fields import SamplingFields
from gateway.requests.grammar_fields import AskedGrammar, JsonSchemaFormat, ResponseFormatFields
from gateway.requests.openai_schema import (
    NO_EFFECT,
    ChatBody,
    CompletionRequest,
    MessageFields,
    chat_request,
    check_other_fields,
)
from gateway.requests.request_body import JsonBody
from gateway.requests.responses_body import ResponsesBody, TextFields
from gateway.requests.responses_items import messages_of
from gateway.requests.responses_repeated import repeated
from gateway.requests.responses_tools import chat_tools

EARLIER_ITEMS = "earlier_items"  # in a stored body: how many of `input` are those of earlier responses
_LOGPROBS = "message.output_text.logprobs"

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
    try:
        request = chat_request(_chat(fields, messages), ignored, include_usage=bool(fields.stream))
    except InvalidRequest as error:
        param = error.param and _worded(error.param)
        raise type(error)(_worded(error.message), param=param, code=error.code) from error
    return replace(
        request,
        prompt_param="input",
        max_tokens_param="max_output_tokens",
        grammar=_in_our_words(request.grammar),
        answer_grammar=_in_our_words(request.answer_grammar),
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


def _in_our_words(asked: AskedGrammar | None) -> AskedGrammar | None:
    return asked and replace(asked, param=_worded(asked.param))


def _worded(said: str) -> str:
    for chats, ours in _WORDS:
        said = said.replace(chats, ours)
    return said
