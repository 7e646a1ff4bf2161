"""Converter from the text of one choice to message deltas: reasoning, content, and tool calls with ids. Pure.

    parser = MessageParser(reasoning, tools, call_id)     either parser may be None
    delta = parser.push(text)                             with is_last=True for the last text

The reasoning parser reads first; the tool parser reads the content that remains.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.text.parsers.parts import Arguments, CallBegins, Content, Parser, Part, Reasoning, ReasoningParser


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of one call: the id and name in its first delta, then pieces of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class MessageParser:
    def __init__(self, reasoning: ReasoningParser | None, tools: Parser | None, call_id: Callable[[int], str]) -> None:
        self.num_calls = 0
        self._num_tokens_to_content = 0
        self._reasoning = reasoning
        self._tools = tools
        self._call_id = call_id

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens up to the end of the reasoning, including its tags."""
        return self._num_tokens_to_content if self._reasoning is not None and self._reasoning.has_thought else 0

    def push(self, text: str, *, num_tokens: int = 1, is_last: bool = False) -> MessageDelta:
        """Parse the next text of the choice, decoded from `num_tokens` tokens."""
        if self._reasoning is not None and not self._reasoning.is_over:
            self._num_tokens_to_content += num_tokens
        content, reasoning, calls = "", "", dict[int, ToolCallDelta]()
        for part in self._parts(text, is_last):
            match part:
                case Content(more):
                    content += more
                case Reasoning(more):
                    reasoning += more
                case CallBegins(name):
                    number, self.num_calls = self.num_calls, self.num_calls + 1
                    calls[number] = ToolCallDelta(number, "", self._call_id(number), name)
                case Arguments(more):
                    number = self.num_calls - 1
                    before = calls.get(number, ToolCallDelta(number, ""))
                    calls[number] = replace(before, arguments=before.arguments + more)
        return MessageDelta(content, reasoning, tuple(call for call in calls.values() if call.arguments or call.id))

    def _parts(self, text: str, is_last: bool) -> Iterator[Part]:
        parts: list[Part] = [Content(text)] if self._reasoning is None else list(self._reasoning.push(text))
        if is_last and self._reasoning is not None:
            parts += self._reasoning.finish()
        for part in parts:
            if self._tools is not None and isinstance(part, Content):
                yield from self._tools.push(part.text)
            else:
                yield part
        if is_last and self._tools is not None:
            yield from self._tools.finish()


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the deltas of one message into one delta per call."""
    calls: dict[int, ToolCallDelta] = {}
    arguments = defaultdict[int, list[str]](list)
    for delta in deltas:
        calls.setdefault(delta.index, delta)
        arguments[delta.index].append(delta.arguments)
    return [replace(call, arguments="".join(arguments[index])) for index, call in calls.items()]
