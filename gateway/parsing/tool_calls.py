"""Tool calls as families of models write them -> parts. Pure.

hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list between the tags (Hermes, Qwen)
llama3_json   the answer begins with {"name": ..., "parameters": {...}} or <|python_tag|>; several with ; or ,
mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} (since v11)
listed        [{"name": ..., "arguments": {...}}, ...]: what the grammar of a required call writes
named         the arguments alone: what the grammar of a named call writes

Where the answer may have a form instead, AnswerOrCalls tells which of the two it is.

A token's way back, behind its text. It knows no schema and no request.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from gateway.parsing.json_scanner import CallScanner, Scan, ValueScanner
from gateway.parsing.parts import Arguments, CallBegins, Content, Parser, Part, StepParser

_SEPARATORS = " \t\r\n[],;"  # between calls, in whatever list they are written
_NAME = re.compile(r"[\w.-]{1,256}")
_BEHIND_NAME = "[ARGS]"
_NO_WHITE_SPACE = str.maketrans("", "", " \n")
_REREAD_CHARS = 2**14  # of an answer: of no calls within each other, a thousand deep, the last would be read 1000 times


class NamedCall:
    """All text is the arguments of one function."""

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
    """Calls behind a mark. The mark, its end and separators around calls are dropped; all else is content."""

    def __init__(self, mark: str, end: str = "", *, begins_marked: bool = False, names_first: bool = False) -> None:
        """`begins_marked`: calls may stand at the text's start without it. `names_first`: as Mistral since v11."""
        super().__init__(self._before_call if begins_marked else self._in_text)
        self._mark = mark
        self._end = end
        self._names_first = names_first
        self._since_mark = ""  # what comes back as content if no call follows; kept until one does
        self._is_call = False
        self._reread_chars = _REREAD_CHARS
        self._call = CallScanner()
        self._arguments = ValueScanner()

    def finish(self) -> Iterator[Part]:
        """A call that has not told its name is content after all."""
        raw = self._call.raw if self._step == self._in_call else ""
        yield Content(self._since_mark + raw + self._buffer)

    def _in_text(self) -> Iterator[Part]:
        before, is_marked = self._text_before(self._mark)
        yield Content(before)
        if is_marked:
            self._since_mark, self._is_call, self._step = self._mark, False, self._before_call

    def _before_call(self) -> Iterator[Part]:
        for tag, following in ((self._end, self._behind_end), (self._mark, self._before_call)):
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

    def _behind_end(self) -> Iterator[Part]:
        if not self._is_call:  # there was nothing between the marks
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
        behind = self._buffer[name.end() :]
        if behind.startswith((_BEHIND_NAME, "{")):
            yield CallBegins(name[0])
            self._call_is_certain()
            self._buffer = behind.removeprefix(_BEHIND_NAME)
            self._arguments, self._step = ValueScanner(), self._in_arguments
        elif _BEHIND_NAME.startswith(behind):  # it may go on with either
            self._waits = True
        else:
            yield from self._no_call("")

    def _in_arguments(self) -> Iterator[Part]:
        for position, char in enumerate(self._buffer):
            scan = self._arguments.take(char)
            if scan is not Scan.MORE:
                end = position + (scan is Scan.LAST)
                yield Arguments(self._buffer[:end])
                self._buffer, self._step = self._buffer[end:], self._before_call
                return
        yield Arguments(self._buffer)
        self._buffer = ""

    def _no_call(self, text: str) -> Iterator[Part]:
        """The text since the mark is content, and `text` is to be read again as such, or is content as it is."""
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
    return MarkedCalls("\x00", begins_marked=True)  # JSON has no such character: there is no mark


def call_family(parser: str, template_source: str) -> str:
    """`parser`: the option, which is "auto" or a family. A template of Mistral or Llama 3 has their marks in it;
    everyone else is taught as Hermes was."""
    if parser != "auto":
        return parser
    if "[TOOL_CALLS]" in template_source:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in template_source else "hermes"


# name of --tool-call-parser -> (what makes one, the mark that may be a special token)
TOOL_CALL_PARSERS: dict[str, tuple[Callable[[], Parser], str]] = {
    "hermes": (hermes, "<tool_call>"),
    "llama3_json": (llama3_json, "<|python_tag|>"),
    "mistral": (mistral, "[TOOL_CALLS]"),
}


class _Is(Enum):
    UNDECIDED = "undecided"
    ANSWER = "answer"
    CALLS = "calls"


class AnswerOrCalls:
    """An answer of a certain form, or calls: what the text begins with decides it once and for all.

    For answers whose grammar leaves the model that choice (requests/call_grammar.py). An answer may then have whatever
    looks like a call in it, in a string, say: it stays what it is.
    """

    def __init__(self, calls: Parser, beginnings: Sequence[str]) -> None:
        """`beginnings`: of calls, without white space; no answer begins with one."""
        self._calls = calls
        self._beginnings = beginnings
        self._held: list[str] = []
        self._said = ""  # that, without white space: no longer than the longest beginning
        self._it = _Is.UNDECIDED

    def push(self, text: str) -> Iterator[Part]:
        if self._it is _Is.UNDECIDED:
            self._held.append(text)
            self._said += text.translate(_NO_WHITE_SPACE)
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
        if any(map(self._said.startswith, self._beginnings)):
            return _Is.CALLS
        may_be_calls = any(beginning.startswith(self._said) for beginning in self._beginnings)
        return _Is.UNDECIDED if may_be_calls else _Is.ANSWER


def answer_or_calls_parser(family: str, names: Sequence[str]) -> Parser:
    """`family`: as --tool-call-parser names it; `names`: of the functions that can be called."""
    make, mark = TOOL_CALL_PARSERS[family]
    bare = [f'{{"name":"{name}","parameters":' for name in names] if family == "llama3_json" else []
    return AnswerOrCalls(make(), [mark, *bare])
