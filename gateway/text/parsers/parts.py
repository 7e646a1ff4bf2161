"""The parts of an answer's text and the base of all streaming parsers. Pure.

A parser accepts text in pieces of any size and emits each part as soon as it is certain. The parts do not depend on how
the text was cut, so streamed and complete answers are equal. Text that looked like a call but is none becomes content;
only tags and white space around them are dropped.
"""

from collections.abc import Callable, Iterator, Sequence
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
        self._skips_space = False  # before the next step

    def push(self, text: str) -> Iterator[Part]:
        self._buffer += text
        self._waits = False
        while self._buffer and not self._waits:
            if self._skips_space:
                self._buffer = self._buffer.lstrip()
                self._skips_space = not self._buffer
            else:
                yield from self._step()

    def _after_space(self, step: Callable[[], Iterator[Part]]) -> None:
        """Select the next step, which begins with the first character that is no white space."""
        self._step, self._skips_space = step, True

    def _text_before(self, tags: Sequence[str]) -> tuple[str, str]:
        """Consume the text before the first of `tags`, and that tag. Return both; the tag is "" if none is there.

        A possible start of a tag stays buffered.
        """
        place, tag = first_tag(self._buffer, tags)
        certain = place if tag else len(self._buffer) - max(held_length(self._buffer, one) for one in tags)
        before, self._buffer = self._buffer[:certain], self._buffer[certain + len(tag) :]
        self._waits = not tag
        return before, tag

    def _tag_here(self, tags: Sequence[str]) -> str:
        """Consume and return the tag of `tags` with which the buffer begins, or return "".

        If the buffer is a proper prefix of a tag, the parser waits for more text.
        """
        found = max((tag for tag in tags if self._buffer.startswith(tag)), key=len, default="")
        if not found:
            self._waits = any(tag.startswith(self._buffer) for tag in tags)
        self._buffer = self._buffer[len(found) :]
        return found


def first_tag(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first tag in `text` and the tag, the longest if several begin there; (0, "") if none."""
    found = [(place, -len(tag), tag) for tag in tags if (place := text.find(tag)) >= 0]
    if not found:
        return 0, ""
    place, _, tag = min(found)
    return place, tag


def held_length(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
