"""Anthropic's content blocks, tools and tool choices -> the same in the words of a chat. Pure.

A message's blocks become one chat message of its texts and calls; each result of a tool one of its own before it. A
document that is a text becomes one, in the tags that Anthropic recommends for prompts; others are refused.
Thoughts of earlier answers are left out, as chat templates do with them. Tools that Anthropic's servers would run are
refused.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.requests.grammar_fields import (
    MAX_TOOLS,
    CalledFunction,
    FunctionFields,
    FunctionName,
    NamedFunction,
    NamedTool,
    ToolCallFields,
    ToolChoice,
    ToolFields,
)
from gateway.requests.openai_schema import ContentPart, MessageFields

CALL_ID_PREFIX = "toolu_"  # a call's own id follows, in the form that every chat template takes


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class TextPart(msgspec.Struct, kw_only=True):
    """Where nothing but texts may stand."""

    type: Literal["text"]
    text: str


class PlainTextSource(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(msgspec.Struct, kw_only=True, tag_field="type", tag="content"):
    content: str | list[TextPart]


class Citations(msgspec.Struct, kw_only=True):
    enabled: Literal[False] | None = None  # nothing here says where an answer was found


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    source: PlainTextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


Block: TypeAlias = TextBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
# Texts are of all of them; thoughts and calls are the assistant's.
_OF_THE_USER = (DocumentBlock, ToolResultBlock)


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


AnthropicTools: TypeAlias = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]


def chat_messages(message: AnthropicMessage, path: str) -> list[MessageFields]:
    """`path`: of the message, to name what is wrong. Raises InvalidRequest."""
    if isinstance(message.content, str):
        return [MessageFields(message.role, message.content)]
    texts, calls, results = list[ContentPart](), list[ToolCallFields](), list[MessageFields]()
    for index, block in enumerate(message.content):
        _check_role(block, message.role, f"{path}.content[{index}].type")
        match block:
            case TextBlock() | DocumentBlock():
                texts.append(ContentPart("text", _text_of(block)))
            case ToolUseBlock():
                function = CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCallFields(id=block.id.removeprefix(CALL_ID_PREFIX), function=function))
            case ToolResultBlock():
                results.append(_result(block))
            case _:
                pass
    if results and not texts:
        return results
    return [*results, MessageFields(message.role, list[ContentPart](texts), tool_calls=calls or None)]


def chat_tools(tools: AnthropicTools) -> list[ToolFields]:
    """Raises UnsupportedParameter and InvalidRequest."""
    chosen = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise UnsupportedParameter(
                f"{param}.type: this server runs no tools itself; expected 'custom', got {tool.type[:64]!r}.",
                param=f"{param}.type",
            )
        if tool.name in {other.name for other in tools[:index]}:
            raise InvalidRequest(f"{param}.name: {tool.name!r} is given more than once.", param=f"{param}.name")
        function = FunctionFields(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        chosen.append(ToolFields(type="function", function=function))
    return chosen


def chat_tool_choice(choice: AnthropicToolChoice, tools: AnthropicTools) -> ToolChoice:
    """Raises InvalidRequest."""
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    names = [tool.name for tool in tools]
    if choice.name not in names:
        known = ", ".join(names[:10]) or "none"
        raise InvalidRequest(
            f"tool_choice.name: {(choice.name or '')[:128]!r} is none of the tools; they are {known}.",
            param="tool_choice.name",
        )
    return NamedTool(function=NamedFunction(choice.name))


def _check_role(block: Block, role: str, param: str) -> None:
    owner = "user" if isinstance(block, _OF_THE_USER) else "assistant"
    if isinstance(block, TextBlock) or owner == role:
        return
    kind = type(block).__struct_config__.tag
    raise InvalidRequest(f"{param}: a message of the {role} has no block of type {kind!r}.", param=param)


def _result(block: ToolResultBlock) -> MessageFields:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(map(_text_of, content))
    text = f"Error: {text}" if block.is_error else text
    return MessageFields("tool", text, tool_call_id=block.tool_use_id.removeprefix(CALL_ID_PREFIX))


def _text_of(block: TextBlock | DocumentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    source = block.source
    if isinstance(source, PlainTextSource):
        text = source.data
    else:
        text = source.content if isinstance(source.content, str) else "\n".join(part.text for part in source.content)
    named = {"title": block.title, "context": block.context}
    head = "".join(f"<{tag}>{value}</{tag}>\n" for tag, value in named.items() if value)
    return f"<document>\n{head}<document_contents>\n{text}\n</document_contents>\n</document>"
