"""The parts of an answer's text, and what every parser of it does. Pure.

A parser reads text in whatever pieces it comes and says what each stretch of it is, as soon as that is certain. The
parts do not depend on the pieces, so a streamed answer is the whole one, cut. Text that was taken for a call and is
none comes back as content: nothing but tags and white space around them is ever dropped.
"""

from collections.abc import Iterator
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
        """What was held back, when no text follows."""


def held_length(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may become `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
