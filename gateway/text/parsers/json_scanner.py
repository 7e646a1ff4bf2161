"""Incremental scanners for a JSON value and for a JSON object that calls a function. Pure.

    {"name": "f", "arguments": {...}}     or with "parameters"; keys in any order, other keys are skipped

Arguments are emitted as they arrive once the name is known. The scanner does not validate the arguments. With a list of
functions, an object with other keys or another function is rejected at the first character that shows it.
"""

import json
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from gateway.text.parsers.parts import Arguments, CallBegins, Part

_WHITE_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class Scan(Enum):
    MORE = "more"  # the character belongs to the value, which continues
    LAST = "last"  # the character completes the value
    NOT_OF_IT = "not of it"  # the value ended before this character, or the text is no such value


class ValueScanner:
    """Scanner for one value: an object, an array, a string, or text up to `,`, `}`, `]`, or white space."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_bare = False  # a number, true, false, null

    def end_in(self, text: str) -> int | None:
        """Read a text; return where the value ends in it, or None if it continues."""
        for place, char in enumerate(text):
            scan = self.take(char)
            if scan is not Scan.MORE:
                return place + (scan is Scan.LAST)
        return None

    def take(self, char: str) -> Scan:
        if self._in_string:
            return self._in_a_string(char)
        if self._is_bare:
            return Scan.NOT_OF_IT if char in ",}]" or char in _WHITE_SPACE else Scan.MORE
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return Scan.NOT_OF_IT if self._depth < 0 else Scan.MORE if self._depth else Scan.LAST
        elif self._depth == 0:
            self._is_bare = True
        return Scan.MORE

    def _in_a_string(self, char: str) -> Scan:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            return Scan.MORE if self._depth else Scan.LAST
        return Scan.MORE


class CallScanner:
    """Scanner for one object; results are in `parts`.

    Characters are collected in lists because appending to a string copies it.
    """

    def __init__(self, functions: Collection[str] | None = None) -> None:
        """Create a scanner.

        Args:
            functions: Allowed names; the object must then have exactly two keys. None allows any name and other keys.
        """
        self.parts: list[Part] = []
        self._functions = functions
        self._raw: list[str] = []
        self.has_begun = False
        self._state: Callable[[str], Scan] = self._before
        self._key: list[str] = []
        self._value: list[str] = []
        self._is_bound = False  # the value must name one of the functions
        self._scanner = ValueScanner()
        self._held_arguments: list[str] = []  # arguments that arrived before the name
        self.has_arguments = False  # True from their first character

    @property
    def raw(self) -> str:
        """The text read before the call began."""
        return "".join(self._raw)

    def take(self, char: str) -> Scan:
        """Read one character; NOT_OF_IT means that the text is not a call."""
        if not self.has_begun:
            self._raw.append(char)
        return self._state(char)

    def _before(self, char: str) -> Scan:
        if char != "{":
            return Scan.NOT_OF_IT
        self._state = self._before_key
        return Scan.MORE

    def _before_key(self, char: str) -> Scan:
        if char in _WHITE_SPACE or char == ",":
            return Scan.MORE
        if char == "}":
            return self._end()
        if char != '"':
            return Scan.NOT_OF_IT
        self._key, self._scanner, self._state = [], ValueScanner(), self._in_key
        return self._in_key(char)

    def _in_key(self, char: str) -> Scan:
        self._key.append(char)
        if self._functions is not None and _is_none_of(self._key, self._missing_keys()):
            return Scan.NOT_OF_IT
        if self._scanner.take(char) is Scan.LAST:
            self._state = self._before_value
        return Scan.MORE

    def _missing_keys(self) -> tuple[str, ...]:
        return (() if self.has_begun else ("name",)) + (() if self.has_arguments else _ARGUMENT_KEYS)

    def _before_value(self, char: str) -> Scan:
        if char in _WHITE_SPACE or char == ":":
            return Scan.MORE
        self._value, self._scanner = [], ValueScanner()
        key = _text(self._key)
        self._is_bound = self._functions is not None and key == "name"
        is_arguments = key in _ARGUMENT_KEYS and not self.has_arguments
        if self._functions is not None and is_arguments and char not in '{"':
            return Scan.NOT_OF_IT
        # OpenAI's format has the arguments as a JSON string: it is unescaped when it is complete.
        self._state = self._in_arguments if is_arguments and char != '"' else self._in_value
        return self._state(char)

    def _in_value(self, char: str) -> Scan:
        scan = self._scanner.take(char)
        if scan is not Scan.NOT_OF_IT:
            self._value.append(char)
        if self._is_bound and _is_none_of(self._value, self._functions or ()):
            return Scan.NOT_OF_IT
        if scan is Scan.MORE:
            return scan
        self._state = self._before_key
        key, value = _text(self._key), _text(self._value)
        if key == "name" and not self.has_begun:
            if not value:
                return Scan.NOT_OF_IT
            self._begin(value)
        elif key in _ARGUMENT_KEYS and not self.has_arguments:
            self.has_arguments = True
            self._add_arguments(value)
        return self._before_key(char) if scan is Scan.NOT_OF_IT else Scan.MORE

    def _in_arguments(self, char: str) -> Scan:
        self.has_arguments = True
        scan = self._scanner.take(char)
        if scan is Scan.NOT_OF_IT:
            self._state = self._before_key
            return self._before_key(char)
        self._add_arguments(char)
        if scan is Scan.LAST:
            self._state = self._before_key
        return Scan.MORE

    def _begin(self, name: str) -> None:
        self.has_begun = True
        self._raw.clear()
        self.parts.append(CallBegins(name))
        if self._held_arguments:
            self.parts.append(Arguments("".join(self._held_arguments)))

    def _add_arguments(self, text: str) -> None:
        if self.has_begun:
            self.parts.append(Arguments(text))
        else:
            self._held_arguments.append(text)

    def _end(self) -> Scan:
        if not self.has_begun or (self._functions is not None and not self.has_arguments):
            return Scan.NOT_OF_IT
        if not self.has_arguments:
            self.parts.append(Arguments("{}"))
        return Scan.LAST


def _is_none_of(beginning: Sequence[str], texts: Collection[str]) -> bool:
    """Return whether `beginning` is not a prefix of any of `texts` written as a JSON string."""
    return not any(f'"{text}"'.startswith("".join(beginning)) for text in texts)


def _text(value: Sequence[str]) -> str:
    """Return the text of a JSON string, or "" for any other value."""
    if not value or value[0] != '"':
        return ""
    try:
        return str(json.loads("".join(value)))
    except ValueError:
        return ""
