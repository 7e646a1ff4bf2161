"""What Anthropic's API asks of a conversation as a whole: texts that say something, and calls with their results. Pure.

Messages of one role behind each other are one turn, whose `tool_result` blocks answer the `tool_use` blocks of the turn
before, each of them once; a system's message between them belongs to neither.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.errors import InvalidRequest
from gateway.requests.anthropic_blocks import AnthropicMessage, TextBlock, ToolResultBlock, ToolUseBlock


@dataclass(slots=True)
class _Calls:
    """Those of the last turn of the assistant."""

    paths: dict[str, str] = field(default_factory=dict)  # by id; where each call stands
    answered: set[str] = field(default_factory=set)


def check_turns(messages: Sequence[AnthropicMessage]) -> None:
    """Raises InvalidRequest."""
    calls, role = _Calls(), ""
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if message.role == "user":
            _check_says_something(message, path)
        if message.role == "system":
            continue
        if message.role == "assistant" and role != "assistant":
            _check_all_answered(calls)
            calls = _Calls()
        role = message.role
        if not isinstance(message.content, str):
            _note_calls(message, path, calls)
    _check_all_answered(calls)


def _note_calls(message: AnthropicMessage, path: str, calls: _Calls) -> None:
    for place, block in _blocks(message, path):
        if isinstance(block, ToolUseBlock):
            calls.paths[block.id] = place
        elif isinstance(block, ToolResultBlock):
            _check_result(block, f"{place}.tool_use_id", calls)


def _check_result(block: ToolResultBlock, param: str, calls: _Calls) -> None:
    shown = repr(block.tool_use_id[:100])
    if block.tool_use_id not in calls.paths:
        raise InvalidRequest(f"{param}: {shown} is no tool_use of the assistant's turn before it.", param=param)
    if block.tool_use_id in calls.answered:
        raise InvalidRequest(f"{param}: {shown} has a result already.", param=param)
    calls.answered.add(block.tool_use_id)


def _check_all_answered(calls: _Calls) -> None:
    for call_id, param in calls.paths.items():
        if call_id not in calls.answered:
            raise InvalidRequest(f"{param}: this tool_use has no tool_result in the turn behind it.", param=param)


def _check_says_something(message: AnthropicMessage, path: str) -> None:
    if isinstance(message.content, str):
        _check_text(message.content, path)
        return
    if not message.content:
        raise InvalidRequest(f"{path}: a message of the user needs at least one block.", param=path)
    for place, block in _blocks(message, path):
        if isinstance(block, TextBlock):
            _check_text(block.text, f"{place}.text")


def _check_text(text: str, param: str) -> None:
    if not text or text.isspace():
        raise InvalidRequest(f"{param}: expected a text that is not empty.", param=param)


def _blocks(message: AnthropicMessage, path: str) -> Iterator[tuple[str, object]]:
    for index, block in enumerate(message.content):
        yield f"{path}[{index}]", block
