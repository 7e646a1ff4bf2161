"""The parts of an answer's text, and what every parser of it does. Pure.

A parser reads text in whatever pieces it comes and says what each stretch of it is, as soon as that is certain. The
parts do not depend on the pieces, so a streamed answer is the whole one, cut. Text that was taken for a call and is
none comes back as content: nothing but tags and white space around them is ever dropped.

A token's way back, behind its text: every parser is made of these. It knows no family of models.
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
    """The arguments that follow are this function's, until another call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which together are a JSON object's text."""

    text: str


Part: TypeAlias = Content | Reasoning | CallBegins | Arguments


class Parser(Protocol):
    def push(self, text: str) -> Iterator[Part]: ...

    def finish(self) -> Iterator[Part]:
        """The rest that was held back, when no text follows."""


class ReasoningParser(Parser, Protocol):
    @property
    def has_thought(self) -> bool:
        """Whether there was reasoning, or a mark of it."""

    @property
    def is_over(self) -> bool:
        """Whether all that follows is content."""


class StepParser:
    """Reads its buffer step by step: each takes something of it, names the next one, or waits for more text."""

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
        """Takes the text up to `tag`, and the tag if it is there; what may become one stays, and is waited for."""
        before, found, behind = self._buffer.partition(tag)
        if found:
            self._buffer = behind
            return before, True
        certain = len(self._buffer) - held_length(self._buffer, tag)
        before, self._buffer, self._waits = self._buffer[:certain], self._buffer[certain:], True
        return before, False


def held_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may become `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
