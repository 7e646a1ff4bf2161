"""Anthropic content blocks, tools, and tool choices, converted to those of a chat, and the checks of turns. Pure.

The blocks of a message become one chat message with its texts and calls; each tool result becomes a message before it.
Text documents are wrapped in the tags that Anthropic recommends for prompts; other documents are refused. Reasoning of
earlier answers is passed to the chat template, which decides what to keep. Tools that run on Anthropic's servers are
refused.

Consecutive messages of one role are one turn. Its `tool_result` blocks answer each `tool_use` block of the turn before
exactly once. A system message between them belongs to neither turn.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.pipeline.chat_request import TEXT_ONLY, ContentPart, MessageFields
from gateway.pipeline.grammar import (
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

CALL_ID_PREFIX = "toolu_"  # followed by a call id that every chat template accepts


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class TextPart(msgspec.Struct, kw_only=True):
    """An element of a list that allows only texts."""

    type: Literal["text"]
    text: str


class PlainTextSource(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    media_type: Literal["text/plain"]
    data: str


class ContentSource(msgspec.Struct, kw_only=True, tag_field="type", tag="content"):
    content: str | list[TextPart]


class Citations(msgspec.Struct, kw_only=True):
    enabled: Literal[False] | None = None  # citations are not supported


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    source: PlainTextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Refused with its place, wherever a block may be."""

    source: dict[str, Any] | None = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | DocumentBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


Block: TypeAlias = (
    TextBlock | DocumentBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)
# All roles may send texts; reasoning and calls belong to the assistant.
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
    """Convert one message.

    Args:
        message: A message of the body.
        path: Its path, for errors.

    Raises:
        InvalidRequest: If a block does not fit the role, or is an image.
    """
    if isinstance(message.content, str):
        return [MessageFields(message.role, message.content)]
    texts, calls, results = list[ContentPart](), list[ToolCallFields](), list[MessageFields]()
    thoughts = list[str]()
    for index, block in enumerate(message.content):
        param = f"{path}.content[{index}]"
        _check_role(block, message.role, f"{param}.type")
        match block:
            case TextBlock() | DocumentBlock():
                texts.append(ContentPart("text", _text_of(block)))
            case ToolUseBlock():
                function = CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCallFields(id=block.id.removeprefix(CALL_ID_PREFIX), function=function))
            case ToolResultBlock():
                results.append(_result(block, param))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ImageBlock():
                raise _no_images(param)
    if results and not texts:
        return results
    content, reasoning = list[ContentPart](texts), "\n".join(thoughts) or None
    return [*results, MessageFields(message.role, content, tool_calls=calls or None, reasoning=reasoning)]


def chat_tools(tools: AnthropicTools) -> list[ToolFields]:
    """Convert tools.

    Raises:
        UnsupportedParameter: For a tool that Anthropic's servers would run.
    """
    chosen = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise UnsupportedParameter(
                f"{param}.type: server-side tools are not supported; expected 'custom', got {tool.type[:64]!r}.",
                param=f"{param}.type",
            )
        function = FunctionFields(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        chosen.append(ToolFields(type="function", function=function))
    return chosen


def chat_tool_choice(choice: AnthropicToolChoice) -> ToolChoice:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    return NamedTool(function=NamedFunction(choice.name or ""))


def _no_images(param: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{param}.type: 'image' is not supported; {TEXT_ONLY}.", param=f"{param}.type")


def _check_role(block: Block, role: str, param: str) -> None:
    owner = "user" if isinstance(block, _OF_THE_USER) else "assistant"
    if isinstance(block, TextBlock | ImageBlock) or owner == role:
        return
    kind = type(block).__struct_config__.tag
    raise InvalidRequest(f"{param}: blocks of type {kind!r} are not allowed in a {role} message.", param=param)


def _result(block: ToolResultBlock, param: str) -> MessageFields:
    content = block.content or ""
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(_text_of(part, f"{param}.content[{place}]") for place, part in enumerate(content))
    text = f"Error: {text}" if block.is_error else text
    return MessageFields("tool", text, tool_call_id=block.tool_use_id.removeprefix(CALL_ID_PREFIX))


def _text_of(block: TextBlock | DocumentBlock | ImageBlock, param: str = "") -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise _no_images(param)
    source = block.source
    if isinstance(source, PlainTextSource):
        text = source.data
    else:
        text = source.content if isinstance(source.content, str) else "\n".join(part.text for part in source.content)
    named = {"title": block.title, "context": block.context}
    head = "".join(f"<{tag}>{value}</{tag}>\n" for tag, value in named.items() if value)
    return f"<document>\n{head}<document_contents>\n{text}\n</document_contents>\n</document>"


@dataclass(slots=True)
class _Calls:
    """The calls of the assistant's last turn."""

    unanswered: dict[str, str] = field(default_factory=dict)  # call id -> path in the body
    answered: set[str] = field(default_factory=set)

    def check_all_answered(self) -> None:
        for param in self.unanswered.values():
            raise InvalidRequest(f"{param}: this tool_use has no tool_result in the next turn.", param=param)


def check_turns(messages: Sequence[AnthropicMessage]) -> None:
    """Raise InvalidRequest unless each tool_use has exactly one tool_result in the next turn."""
    calls, role = _Calls(), ""
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "user":
            _check_says_something(message, path)
        if message.role == "system":
            continue
        if message.role == "assistant" and role != "assistant":
            calls.check_all_answered()
            calls = _Calls()
        role = message.role
        if not isinstance(message.content, str):
            _note_calls(message, path, calls)
    calls.check_all_answered()


def _note_calls(message: AnthropicMessage, path: str, calls: _Calls) -> None:
    for place, block in _blocks(message, path):
        if isinstance(block, ToolUseBlock):
            calls.unanswered[block.id] = place
        elif isinstance(block, ToolResultBlock):
            _check_result(block, f"{place}.tool_use_id", calls)


def _check_result(block: ToolResultBlock, param: str, calls: _Calls) -> None:
    shown = repr(block.tool_use_id[:100])
    if block.tool_use_id in calls.answered:
        raise InvalidRequest(f"{param}: {shown} already has a result.", param=param)
    if calls.unanswered.pop(block.tool_use_id, None) is None:
        raise InvalidRequest(f"{param}: no tool_use {shown} in the assistant's previous turn.", param=param)
    calls.answered.add(block.tool_use_id)


def _check_says_something(message: AnthropicMessage, path: str) -> None:
    if isinstance(message.content, str):
        _check_text(message.content, path)
        return
    if not message.content:
        raise InvalidRequest(f"{path}: a user message needs at least one block.", param=path)
    for place, block in _blocks(message, path):
        if isinstance(block, TextBlock):
            _check_text(block.text, f"{place}.text")


def _check_text(text: str, param: str) -> None:
    if not text or text.isspace():
        raise InvalidRequest(f"{param}: expected a non-empty text.", param=param)


def _blocks(message: AnthropicMessage, path: str) -> Iterator[tuple[str, object]]:
    for index, block in enumerate(message.content):
        yield f"{path}[{index}]", block
