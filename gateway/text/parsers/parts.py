"""The parts of an answer's text and the base of all streaming parsers. Pure.

A parser accepts text in pieces of any size and emits each part as soon as it is certain. The parts do not depend on how
the text was cut, so streamed and complete answers are equal. Text that looked like a call but is none becomes content;
only tags and white space around them are dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Start of a call; the arguments that follow belong to it until the next call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; joined, the pieces are the text of a JSON object."""

    text: str


Part: TypeAlias = Content | Reasoning | CallBegins | Arguments


class Parser(Protocol):
    def push(self, text: str) -> Iterator[Part]: ...

    def finish(self) -> Iterator[Part]:
        """Emit the text that was held back; no more text follows."""


class ReasoningParser(Parser, Protocol):
    @property
    def has_thought(self) -> bool:
        """Whether reasoning text or one of its tags was found."""

    @property
    def is_over(self) -> bool:
        """Whether all following text is content."""


class StepParser:
    """Parser as a state machine: each step consumes text, selects the next step, or waits for more text."""

    def __init__(self, first_step: Callable[[], Iterator[Part]]) -> None:
        self._buffer = ""
        self._step = first_step
        self._waits = False

    def push(self, text: str) -> Iterator[Part]:
        self._buffer += text
        self._waits = False
        while self._buffer and not self._waits:
            yield from self._step()

    def _text_before(self, tag: str) -> tuple[str, bool]:
        """Consume the text before `tag`, and the tag if it is there; a possible start of the tag stays buffered."""
        before, found, after = self._buffer.partition(tag)
        if found:
            self._buffer = after
            return before, True
        certain = len(self._buffer) - held_length(self._buffer, tag)
        before, self._buffer, self._waits = self._buffer[:certain], self._buffer[certain:], True
        return before, False


def held_length(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
