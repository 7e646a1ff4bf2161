"""Parsers for the tool-call formats of model families. Pure.

hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list between the tags (Hermes, Qwen)
llama3_json   the answer starts with {"name": ..., "parameters": {...}} or <|python_tag|>; separators ; or ,
mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} (since v11)
listed        [{"name": ..., "arguments": {...}}, ...], as the grammar of a required call produces
named         the arguments only, as the grammar of a named call produces
"""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from gateway.text.parsers.json_scanner import CallScanner, Scan, ValueScanner
from gateway.text.parsers.parts import Arguments, CallBegins, Content, Parser, Part, StepParser

_SEPARATORS = " \t\r\n[],;"  # between calls, in any list format
_NAME = re.compile(r"[\w.-]{1,256}")
_AFTER_NAME = "[ARGS]"
_NO_WHITE_SPACE = str.maketrans("", "", " \n")
# Budget per answer for text that is read again as content. Without it, 1,000 nested objects that are no calls would be
# read 1,000 times.
_REREAD_CHARS = 2**14


class NamedCall:
    """Parser for an answer that consists of the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> Iterator[Part]:
        if text and not self._has_begun:
            self._has_begun = True
            yield CallBegins(self._name)
        yield Arguments(text)

    def finish(self) -> Iterator[Part]:
        yield from ()


class MarkedCalls(StepParser):
    """Parser for calls after a marker. Markers and separators around calls are dropped; all else is content."""

    def __init__(self, mark: str, end: str = "", *, begins_marked: bool = False, names_first: bool = False) -> None:
        """Create a parser for one answer.

        Args:
            mark: Marker before calls.
            end: Marker after calls, or "" if there is none.
            begins_marked: Whether the answer may start with a call without the marker.
            names_first: Whether a call is written as name[ARGS]{...} (Mistral since v11).
        """
        super().__init__(self._before_call if begins_marked else self._in_text)
        self._mark = mark
        self._end = end
        self._names_first = names_first
        self._since_mark = ""  # text since the marker; becomes content if no call follows
        self._is_call = False
        self._reread_chars = _REREAD_CHARS
        self._call = CallScanner()
        self._arguments = ValueScanner()

    def finish(self) -> Iterator[Part]:
        """Emit the held text as content; a call without a name is content too."""
        raw = self._call.raw if self._step == self._in_call else ""
        yield Content(self._since_mark + raw + self._buffer)

    def _in_text(self) -> Iterator[Part]:
        before, mark = self._text_before((self._mark,))
        yield Content(before)
        if mark:
            self._since_mark, self._is_call, self._step = self._mark, False, self._before_call

    def _before_call(self) -> Iterator[Part]:
        for tag, following in ((self._end, self._after_end), (self._mark, self._before_call)):
            if tag and self._buffer.startswith(tag):
                self._keep_if_no_call(tag)
                self._buffer, self._step = self._buffer[len(tag) :], following
                return
            if tag and tag.startswith(self._buffer):
                self._waits = True
                return
        first = self._buffer[0]
        if first in _SEPARATORS:
            self._keep_if_no_call(first)
            self._buffer = self._buffer[1:]
        elif first == "{":
            self._call, self._step = CallScanner(), self._in_call
        elif self._names_first and _NAME.match(self._buffer):
            yield from self._in_name()
        else:
            yield from self._no_call("")

    def _after_end(self) -> Iterator[Part]:
        if not self._is_call:  # nothing stood between the markers
            yield from self._no_call("")
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._in_text

    def _in_call(self) -> Iterator[Part]:
        call = self._call
        for position, char in enumerate(self._buffer):
            scan = call.take(char)
            if scan is Scan.MORE:
                continue
            rest = self._buffer[position + 1 :]
            yield from call.parts
            if scan is Scan.LAST:
                self._call_is_certain()
                self._buffer, self._step = rest, self._before_call
            else:
                self._buffer = rest
                if call.has_begun:
                    self._call_is_certain()
                yield from self._no_call(char if call.has_begun else call.raw)
            return
        self._buffer = ""
        if call.has_begun:
            self._call_is_certain()
        yield from call.parts
        call.parts.clear()

    def _in_name(self) -> Iterator[Part]:
        name = _NAME.match(self._buffer)
        assert name is not None
        after = self._buffer[name.end() :]
        if after.startswith((_AFTER_NAME, "{")):
            yield CallBegins(name[0])
            self._call_is_certain()
            self._buffer = after.removeprefix(_AFTER_NAME)
            self._arguments, self._step = ValueScanner(), self._in_arguments
        elif _AFTER_NAME.startswith(after):  # the next text decides
            self._waits = True
        else:
            yield from self._no_call("")

    def _in_arguments(self) -> Iterator[Part]:
        end = self._arguments.end_in(self._buffer)
        yield Arguments(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._step = self._before_call

    def _no_call(self, text: str) -> Iterator[Part]:
        """Emit the text since the marker as content and parse `text` again, within the budget."""
        self._reread_chars -= len(text)
        content, text = (self._since_mark, text) if self._reread_chars >= 0 else (self._since_mark + text, "")
        yield Content(content)
        self._since_mark, self._buffer, self._step = "", text + self._buffer, self._in_text

    def _keep_if_no_call(self, text: str) -> None:
        if not self._is_call:
            self._since_mark += text

    def _call_is_certain(self) -> None:
        self._since_mark, self._is_call = "", True


def hermes() -> Parser:
    return MarkedCalls("<tool_call>", "</tool_call>")


def llama3_json() -> Parser:
    return MarkedCalls("<|python_tag|>", begins_marked=True)


def mistral() -> Parser:
    return MarkedCalls("[TOOL_CALLS]", names_first=True)


def listed() -> Parser:
    return MarkedCalls("\x00", begins_marked=True)  # no marker: JSON cannot contain this character


# family -> (factory, marker before calls); call_grammar.py has a grammar for each
GRAMMAR_FAMILIES: dict[str, tuple[Callable[[], Parser], str]] = {
    "hermes": (hermes, "<tool_call>"),
    "llama3_json": (llama3_json, "<|python_tag|>"),
    "mistral": (mistral, "[TOOL_CALLS]"),
}


class _Is(Enum):
    UNDECIDED = "undecided"
    ANSWER = "answer"
    CALLS = "calls"


class AnswerOrCalls:
    """Parser for text that is either one answer of a given format or calls; its first characters decide.

    Use it when the grammar leaves the choice to the model (pipeline/call_grammar.py). An answer may then contain text
    that looks like a call, for example in a string.
    """

    def __init__(self, calls: Parser, beginnings: Sequence[str]) -> None:
        """Create a parser for one answer.

        Args:
            calls: Parser for the calls.
            beginnings: Prefixes of calls, without white space. No answer starts with one of them.
        """
        self._calls = calls
        self._beginnings = beginnings
        self._held: list[str] = []
        self._compact = ""  # the held text without white space, at most as long as the longest prefix
        self._it = _Is.UNDECIDED

    def push(self, text: str) -> Iterator[Part]:
        if self._it is _Is.UNDECIDED:
            self._held.append(text)
            self._compact += text.translate(_NO_WHITE_SPACE)
            self._it = self._decided()
            if self._it is _Is.UNDECIDED:
                return
            text = "".join(self._held)
            self._held.clear()
        if self._it is _Is.CALLS:
            yield from self._calls.push(text)
        else:
            yield Content(text)

    def finish(self) -> Iterator[Part]:
        if self._it is _Is.CALLS:
            yield from self._calls.finish()
        else:
            yield Content("".join(self._held))

    def _decided(self) -> _Is:
        if any(map(self._compact.startswith, self._beginnings)):
            return _Is.CALLS
        may_be_calls = any(beginning.startswith(self._compact) for beginning in self._beginnings)
        return _Is.UNDECIDED if may_be_calls else _Is.ANSWER


def answer_or_calls_parser(family: str, names: Sequence[str]) -> Parser:
    """Return the parser for an answer whose grammar allows calls.

    Args:
        family: A key of GRAMMAR_FAMILIES.
        names: Names of the functions that can be called.
    """
    make, mark = GRAMMAR_FAMILIES[family]
    bare = [f'{{"name":"{name}","parameters":' for name in names] if family == "llama3_json" else []
    return AnswerOrCalls(make(), [mark, *bare])
