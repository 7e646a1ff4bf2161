"""The text of one choice -> what its message gains: reasoning, content, tool calls with ids. Pure.

    parser = MessageParser(reasoning, tools, call_id)     either may be None
    delta = parser.push(text)                             with is_last at the end

Content is what the parser of reasoning leaves; the one of tools reads that. Ids are the caller's, by the call's number.

A token's way back, behind its text. It knows no family of models: its parsers do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.parsing.parts import Arguments, CallBegins, Content, Parser, Part, Reasoning, ReasoningParser


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The gain of one call: its id and name in its first delta, then pieces of its arguments."""

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
        """Tokens up to the one that ended the reasoning; its tags are among them."""
        return self._num_tokens_to_content if self._reasoning is not None and self._reasoning.has_thought else 0

    def push(self, text: str, *, num_tokens: int = 1, is_last: bool = False) -> MessageDelta:
        """`num_tokens`: that `text` came of."""
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
        told = tuple(call for call in calls.values() if call.arguments or call.id)
        return MessageDelta(content, reasoning, told)

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
    """The deltas of one message, joined: one a call."""
    calls: dict[int, ToolCallDelta] = {}
    arguments = defaultdict[int, list[str]](list)
    for delta in deltas:
        calls.setdefault(delta.index, delta)
        arguments[delta.index].append(delta.arguments)
    return [replace(call, arguments="".join(arguments[index])) for index, call in calls.items()]
