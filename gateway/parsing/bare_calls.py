"""Tool calls that a model writes without its family's marks, at the beginning of its answer -> parts. Pure.

    {"name": "f", "arguments": {...}}      or with "parameters"; several, one behind the other or as a list
    ```json                                as a block of code, each or all of them
    {"name": "f", "arguments": {...}}
    ```

Llama 3 is taught to; small models of other families do so too. A call is an object of these two keys alone, whose name
is one of the tools that were offered: any other JSON is an answer. What may become a call is held back until it is one,
or cannot be. From there on the family's own parser reads, which this one wraps.

Does not know the tools' schemas: arguments are the model's own, as in marked calls.

A token's way back, between its text and its message.
"""

from collections.abc import Collection, Iterator
from enum import Enum

import msgspec

from gateway.parsing.json_scanner import CallScanner, Scan
from gateway.parsing.parts import Arguments, CallBegins, Parser, Part, StepParser
from gateway.parsing.tool_calls import TOOL_CALL_PARSERS, MarkedCalls

_WHITE_SPACE = " \t\r\n"
_BEFORE_FIRST = _WHITE_SPACE + "["
_BEHIND = _WHITE_SPACE + ",;]"
_FENCE = "```"
_JSON_FENCE = "```json"


class _Block(Enum):
    """The block of code that the text stands in."""

    NONE = "none"
    OPEN = "open"
    OF_CALLS = "of calls"


class BareCalls(StepParser):
    def __init__(self, functions: Collection[str], marked: Parser, *, are_taught: bool = False) -> None:
        """`functions`: the names of those offered; `marked`: reads what is no bare call. `are_taught`: bare calls are
        the family's own, so their arguments are handed on while they are written, as those of marked calls are.
        """
        super().__init__(self._before_call)
        self._functions = functions
        self._marked = marked
        self._are_taught = are_taught
        self._call = CallScanner(functions)
        self._held: list[str] = []  # since the last call, or the text's beginning: content, if no call follows
        self._written: list[str] = []  # of the call that is read, as long as it may turn out to be none
        self._has_called = False
        self._block = _Block.NONE

    def finish(self) -> Iterator[Part]:
        if self._step != self._in_other_text:
            self._no_call()
            yield from self._in_other_text()
        yield from self._marked.finish()

    def _before_call(self) -> Iterator[Part]:
        rest = self._buffer.lstrip(_BEHIND + "[" if self._has_called else _BEFORE_FIRST)
        self._held.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        if rest.startswith("{"):
            self._call, self._step = CallScanner(self._functions), self._in_call
        elif rest.startswith("`"):
            self._at_fence()
        elif rest:
            self._no_call()
        yield from ()

    def _at_fence(self) -> None:
        tag = _JSON_FENCE if self._block is _Block.NONE and self._buffer.startswith(_JSON_FENCE) else _FENCE
        longest = _JSON_FENCE if self._block is _Block.NONE else _FENCE
        if self._buffer != longest and longest.startswith(self._buffer):
            self._waits = True
        elif self._block is _Block.OPEN or not self._buffer.startswith(tag):
            self._no_call()
        else:
            self._held.append(tag)
            self._buffer = self._buffer[len(tag) :]
            if self._block is _Block.OF_CALLS:  # its end is dropped with the marks of its calls, as its beginning was
                self._held.clear()
            self._block = _Block.OPEN if self._block is _Block.NONE else _Block.NONE

    def _in_call(self) -> Iterator[Part]:
        for position, char in enumerate(self._buffer):
            scan = self._call.take(char)
            if scan is Scan.MORE:
                continue
            self._written.append(self._buffer[: position + 1])
            self._buffer = self._buffer[position + 1 :]
            if scan is Scan.LAST and (self._is_streamed or self._is_whole()):
                self._step = self._before_call
                yield from self._called()
            else:
                yield from self._broken_off(char)
            return
        self._written.append(self._buffer)
        self._buffer = ""
        if self._is_streamed:
            yield from self._called()

    @property
    def _is_streamed(self) -> bool:
        return self._are_taught and self._call.has_begun and self._call.has_arguments

    def _is_whole(self) -> bool:
        """Whether what is written is JSON, and the arguments an object."""
        arguments = "".join(part.text for part in self._call.parts if isinstance(part, Arguments))
        try:
            msgspec.json.decode("".join(self._written))
            return isinstance(msgspec.json.decode(arguments), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def _called(self) -> Iterator[Part]:
        """The part of the call that is read is certain: the rest of it is handed on as well, or it is whole."""
        parts = self._call.parts
        yield from (part for part in parts if isinstance(part, CallBegins))
        yield Arguments("".join(part.text for part in parts if isinstance(part, Arguments)))
        parts.clear()
        self._held.clear()
        self._written.clear()
        self._has_called = True
        if self._block is _Block.OPEN:
            self._block = _Block.OF_CALLS

    def _broken_off(self, char: str) -> Iterator[Part]:
        """`char`: the first one that is not of a call."""
        if self._is_streamed:
            yield from self._called()
            self._written.append(char)
        self._no_call()

    def _no_call(self) -> None:
        text = "".join(self._held + self._written) + self._buffer
        self._buffer = text.lstrip(_BEHIND) if self._has_called else text
        self._step = self._in_other_text

    def _in_other_text(self) -> Iterator[Part]:
        text, self._buffer = self._buffer, ""
        yield from self._marked.push(text)


def calls_of_offered(family: str, functions: Collection[str]) -> Parser:
    """`family`: as --tool-call-parser names it; `functions`: the names of those that were offered."""
    make, mark = TOOL_CALL_PARSERS[family]
    if family == "llama3_json":
        return BareCalls(functions, MarkedCalls(mark), are_taught=True)
    return BareCalls(functions, make())
