"""Parser for tool calls that a model writes without its family's markers, at the start of an answer.

    {"name": "f", "arguments": {...}}      or with "parameters"; several in sequence or as a list
    ```json                                in a code block, one call or all of them
    {"name": "f", "arguments": {...}}
    ```

Llama 3 is trained to do so, and small models of other families do it too. A JSON object counts as a call only if it
has exactly these two keys and names a tool from the request; any other JSON is content. Text that may become a call is
held back until this is decided. The wrapped parser of the family reads the rest. Arguments are not validated.
"""

from collections.abc import Collection, Iterator
from enum import Enum

import msgspec

from gateway.text.parsers.json_scanner import CallScanner, Scan
from gateway.text.parsers.parts import Arguments, CallBegins, Parser, Part, StepParser

_WHITE_SPACE = " \t\r\n"
_BEFORE_FIRST = _WHITE_SPACE + "["
_AFTER_CALL = _WHITE_SPACE + ",;]"
_FENCE = "```"
_JSON_FENCE = "```json"


class _Block(Enum):
    """State of the Markdown code block around the current text."""

    NONE = "none"
    OPEN = "open"
    OF_CALLS = "of calls"


class BareCalls(StepParser):
    def __init__(self, functions: Collection[str], marked: Parser, *, are_taught: bool = False) -> None:
        """Create a parser for one answer.

        Args:
            functions: Names of the tools in the request.
            marked: Parser for text that is not a bare call.
            are_taught: Whether the family is trained to write bare calls. Their arguments then stream like those of
                marked calls.
        """
        super().__init__(self._before_call)
        self._functions = functions
        self._marked = marked
        self._are_taught = are_taught
        self._call = CallScanner(functions)
        self._held: list[str] = []  # text since the last call or the start; becomes content if no call follows
        self._written: list[str] = []  # raw text of the current call while it may still turn out to be content
        self._has_called = False
        self._block = _Block.NONE

    def finish(self) -> Iterator[Part]:
        if self._step != self._in_other_text:
            self._no_call()
            yield from self._in_other_text()
        yield from self._marked.finish()

    def _before_call(self) -> Iterator[Part]:
        rest = self._buffer.lstrip(_AFTER_CALL + "[" if self._has_called else _BEFORE_FIRST)
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
            if self._block is _Block.OF_CALLS:  # drop the closing fence too
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
        """Return whether the text read so far is valid JSON and the arguments are an object."""
        arguments = "".join(part.text for part in self._call.parts if isinstance(part, Arguments))
        try:
            msgspec.json.decode("".join(self._written))
            return isinstance(msgspec.json.decode(arguments), dict)
        except (msgspec.DecodeError, RecursionError):
            return False

    def _called(self) -> Iterator[Part]:
        """Emit the parts read so far; the text is now certain to be a call."""
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
        """Handle `char`, the first character that cannot belong to a call."""
        if self._is_streamed:
            yield from self._called()
            self._written.append(char)
        self._no_call()

    def _no_call(self) -> None:
        text = "".join(self._held + self._written) + self._buffer
        self._buffer = text.lstrip(_AFTER_CALL) if self._has_called else text
        self._step = self._in_other_text

    def _in_other_text(self) -> Iterator[Part]:
        text, self._buffer = self._buffer, ""
        yield from self._marked.push(text)
