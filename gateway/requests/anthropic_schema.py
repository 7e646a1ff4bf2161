"""Anthropic's request bodies -> CompletionRequest, the same form that OpenAI's take. Pure.

Said in the words of a chat (anthropic_blocks.py); what would change the answer and is not supported is refused, as in
openai_schema.py. A `system` text is the chat's first message. Thoughts are told if `thinking` asks for them, which
takes a parser of them. Their budget is not enforced.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest
from gateway.requests.anthropic_blocks import (
    AnthropicMessage,
    AnthropicToolChoice,
    AnthropicTools,
    TextPart,
    ToolUseBlock,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from gateway.requests.openai_schema import (
    ChatBody,
    CompletionRequest,
    ContentPart,
    MessageFields,
    StopString,
    chat_request,
    check_other_fields,
)
from gateway.requests.request_body import decode_body

System: TypeAlias = str | list[TextPart]


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """What is counted; null is the same as absent."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    system: System | None = None
    tools: AnthropicTools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(PromptFields, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=4)] | None = None
    stream: bool | None = None


# field -> the values at which it changes nothing, null aside
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}


def parse_messages(body: bytes) -> CompletionRequest:
    fields, given = decode_body(body, MessagesBody)
    ignored = check_other_fields(MessagesBody, given, UNSUPPORTED)
    request = chat_request(
        ChatBody(
            max_tokens=fields.max_tokens,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=fields.top_k,
            stop=fields.stop_sequences,
            stream=fields.stream,
            **_prompt(fields),
        ),
        ignored,
        include_usage=bool(fields.stream),
    )
    if request.tools is not None and request.tools.grammar is not None:  # in the field's own words
        param = request.tools.grammar.param.replace(".function.parameters", ".input_schema")
        request = replace(request, grammar=replace(request.tools.grammar, param=param))
    must_think = _must_think(fields)
    return replace(request, must_think=must_think, repeated={"shows_thoughts": must_think})


def parse_count(body: bytes) -> CompletionRequest:
    """Of /v1/messages/count_tokens: the prompt alone."""
    fields, given = decode_body(body, PromptFields)
    check_other_fields(MessagesBody, given, {})
    return chat_request(ChatBody(**_prompt(fields)), ())


def _prompt(fields: PromptFields) -> dict[str, Any]:
    """Of a ChatBody: what its prompt is made of."""
    tools, choice = fields.tools or [], fields.tool_choice
    _check_thinking(fields)
    return {
        "model": fields.model,
        "messages": _chat_messages(fields),
        "continue_final_message": _is_begun(fields),
        "tools": chat_tools(tools),
        "tool_choice": chat_tool_choice(choice, tools) if choice else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        # Templates whose models can leave out thinking take it by this name; the others pass over it.
        "chat_template_kwargs": {"enable_thinking": _must_think(fields)},
    }


def _must_think(fields: PromptFields) -> bool:
    return fields.thinking is not None and fields.thinking.type != "disabled"


def _check_thinking(fields: PromptFields) -> None:
    thinking = fields.thinking
    if thinking is None or not _must_think(fields):
        return
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        param = "thinking.budget_tokens"
        raise InvalidRequest(f"{param}: needed when thinking is enabled.", param=param)
    if fields.tool_choice is not None and fields.tool_choice.type in ("any", "tool"):
        param = "tool_choice"
        raise InvalidRequest(f"{param}: a forced call leaves no room for thinking; expected auto or none.", param=param)
    if _is_begun(fields):
        raise InvalidRequest("thinking: cannot be given with an answer that is begun already.", param="thinking")


def _is_begun(fields: PromptFields) -> bool:
    """An assistant's last message is the beginning of the answer."""
    last = fields.messages[-1]
    if last.role == "assistant" and not isinstance(last.content, str):
        for index, block in enumerate(last.content):
            if isinstance(block, ToolUseBlock):
                param = f"messages[{len(fields.messages) - 1}].content[{index}]"
                raise InvalidRequest(f"{param}: a call of the last message has no result.", param=param)
    return last.role == "assistant"


def _chat_messages(fields: PromptFields) -> list[MessageFields]:
    told = list[MessageFields]()
    if fields.system:
        texts = [fields.system] if isinstance(fields.system, str) else [block.text for block in fields.system]
        told.append(MessageFields("system", [ContentPart("text", text) for text in texts]))
    for index, message in enumerate(fields.messages):
        told += chat_messages(message, f"messages[{index}]")
    return told
