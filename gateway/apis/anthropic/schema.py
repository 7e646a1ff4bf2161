"""Anthropic request bodies, converted to CompletionRequest by way of an equivalent chat body. Pure.

Fields that would change the answer and are not supported are refused, as in pipeline/request.py. `system` becomes the
first message; system messages between others keep their place. `output_config.format` acts as a response format.
Reasoning is returned if `thinking` asks for it: `enabled` needs a reasoning parser, `adaptive` runs without thinking if
there is none. The thinking budget is not enforced.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, structs

from gateway.apis.anthropic.blocks import (
    AnthropicMessage,
    AnthropicToolChoice,
    AnthropicTools,
    TextPart,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    check_turns,
)
from gateway.errors import InvalidRequest
from gateway.http.json_body import JsonBody
from gateway.pipeline.chat_request import ChatBody, ContentPart, MessageFields, request_in_words
from gateway.pipeline.fields import StopString
from gateway.pipeline.grammar import JsonSchemaFormat, ResponseFormatFields
from gateway.pipeline.request import CompletionRequest, check_other_fields

System: TypeAlias = str | list[TextPart]


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None  # "summarized" returns the full text; no summaries exist


class JsonOutput(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """Fields of the prompt, which count_tokens also accepts; null means absent."""

    model: str
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    system: System | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None  # name of the field before output_config


class MessagesBody(PromptFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=4)] | None = None
    stream: bool | None = None


# field -> values besides null that have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


# Field names in errors about the chat body -> the names in this API
_WORDS = (
    ("response_format.json_schema.schema", "{format}.schema"),
    ("response_format", "{format}"),
    (".function.parameters", ".input_schema"),
    (".function.", "."),
)


def parse_messages(body: JsonBody) -> CompletionRequest:
    fields = body.typed(MessagesBody)
    ignored = check_other_fields(MessagesBody, body.given, UNSUPPORTED)
    chat = ChatBody(
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
        stream=fields.stream,
        **_prompt(fields),
    )
    request = _of_chat(fields, chat, ignored)
    shows_reasoning = fields.thinking is not None and fields.thinking.display != "omitted" and _may_think(fields)
    return structs.replace(request, must_think=_must_think(fields), repeated={"shows_reasoning": shows_reasoning})


def parse_count(body: JsonBody) -> CompletionRequest:
    """Parse the body of /v1/messages/count_tokens, which has only the prompt."""
    fields = body.typed(PromptFields)
    check_other_fields(MessagesBody, body.given, {})
    return _of_chat(fields, ChatBody(**_prompt(fields)), ())


def _of_chat(fields: PromptFields, chat: ChatBody, ignored: tuple[str, ...]) -> CompletionRequest:
    """Convert the chat body; errors name the fields of this API."""
    words = [(chats, ours.format(format=_format_param(fields))) for chats, ours in _WORDS]
    request = request_in_words(chat, ignored, words)
    return structs.replace(request, reasons_only_if_parsed=_may_think(fields))


def _prompt(fields: PromptFields) -> dict[str, Any]:
    """Return the ChatBody fields for the prompt, the tools, and the response format."""
    tools, choice = fields.tools or [], fields.tool_choice
    messages = _chat_messages(fields)
    check_turns(fields.messages)
    _check_format(fields)
    _check_thinking(fields)
    return {
        "model": fields.model,
        "messages": messages,
        "continue_final_message": _is_begun(fields),
        "tools": chat_tools(tools),
        "tool_choice": chat_tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(fields),
        "chat_template_kwargs": _template_kwargs(fields),
    }


def _template_kwargs(fields: PromptFields) -> dict[str, Any]:
    """Return the template variables for thinking and effort; templates without them ignore both."""
    effort = fields.output_config.effort if fields.output_config else None
    return {"enable_thinking": _may_think(fields)} | ({"reasoning_effort": effort} if effort else {})


def _response_format(fields: PromptFields) -> ResponseFormatFields | None:
    asked = _format(fields)
    if asked is None:
        return None
    return ResponseFormatFields(type="json_schema", json_schema=JsonSchemaFormat(schema=asked.schema))


def _format(fields: PromptFields) -> JsonOutput | None:
    return (fields.output_config and fields.output_config.format) or fields.output_format


def _format_param(fields: PromptFields) -> str:
    return "output_format" if fields.output_format is not None else "output_config.format"


def _check_format(fields: PromptFields) -> None:
    param = _format_param(fields)
    if fields.output_format is not None and fields.output_config is not None and fields.output_config.format:
        raise InvalidRequest(f"{param}: cannot be given together with output_config.format.", param=param)
    if _format(fields) is not None and _is_begun(fields):
        raise InvalidRequest(f"{param}: cannot be given when the last message is the assistant's.", param=param)


def _must_think(fields: PromptFields) -> bool:
    return fields.thinking is not None and fields.thinking.type == "enabled"


def _may_think(fields: PromptFields) -> bool:
    """Return whether the answer may contain reasoning, which a response format rules out."""
    is_asked = fields.thinking is not None and fields.thinking.type != "disabled"
    return is_asked and _format(fields) is None


def _check_thinking(fields: PromptFields) -> None:
    thinking = fields.thinking
    if thinking is None or thinking.type == "disabled":
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        param = "thinking.budget_tokens"
        raise InvalidRequest(f"{param}: required when thinking is enabled.", param=param)
    if _must_think(fields) and _format(fields) is not None:
        what = _format_param(fields)
        raise InvalidRequest(f"thinking: not possible with {what}; expected adaptive or disabled.", param="thinking")
    if fields.tool_choice is not None and fields.tool_choice.type in ("any", "tool"):
        param = "tool_choice"
        raise InvalidRequest(f"{param}: a forced call excludes thinking; expected auto or none.", param=param)
    if _is_begun(fields):
        raise InvalidRequest("thinking: cannot be given when the last message is the assistant's.", param="thinking")


def _is_begun(fields: PromptFields) -> bool:
    """Return whether the last message is the assistant's: it is then the start of the answer."""
    return fields.messages[-1].role == "assistant"


def _chat_messages(fields: PromptFields) -> list[MessageFields]:
    messages = list[MessageFields]()
    if fields.system:
        texts = [fields.system] if isinstance(fields.system, str) else [block.text for block in fields.system]
        messages.append(MessageFields("system", [ContentPart("text", text) for text in texts]))
    for index, message in enumerate(fields.messages):
        messages += chat_messages(message, f"messages[{index}]")
    return messages
