"""An answer of a certain form, or calls: what the text begins with decides it once and for all. Pure.

For answers whose grammar leaves the model that choice (requests/call_grammar.py). An answer may then have whatever
looks like a call in it, in a string, say: it stays what it is.

A token's way back, between its text and its message. It knows no request and no grammar.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

from gateway.parsing.parts import Content, Parser, Part
from gateway.parsing.tool_calls import TOOL_CALL_PARSERS

_NO_WHITE_SPACE = str.maketrans("", "", " \n")


class _Is(Enum):
    UNDECIDED = "undecided"
    ANSWER = "answer"
    CALLS = "calls"


class AnswerOrCalls:
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
