"""A scan for the end of a JSON value, and for the function that a JSON object calls, character by character. Pure.

    {"name": "f", "arguments": {...}}     or with "parameters"; in any order, other keys are passed over

The arguments are handed on as they are written, from the moment the name is known. Not a validator: what is between the
braces of the arguments is the model's own. Where the functions are named, an object of other keys, or of another
function, is none that calls, and that is told with the first character that shows it.

A token's way back, within a call of a tool. It knows no schema.
"""

import json
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from gateway.parsing.parts import Arguments, CallBegins, Part

_WHITE_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class Scan(Enum):
    MORE = "more"  # the character belongs to it, and it goes on
    LAST = "last"  # the character is its last
    NOT_OF_IT = "not of it"  # it ended before this character, or this is nothing like it


class ValueScanner:
    """The scan of one value: an object, an array, a string, or what stands there up to `,`, `}`, `]` or white space."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_bare = False  # a number, true, false, null

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
    """The scan of one object. `parts` has what it finds. Characters are kept one by one: adding one copies a text."""

    def __init__(self, functions: Collection[str] | None = None) -> None:
        """`functions`: the only ones, called by an object of two keys; None: any, and other keys are passed over."""
        self.parts: list[Part] = []
        self._functions = functions
        self._raw: list[str] = []
        self.has_begun = False
        self._state: Callable[[str], Scan] = self._before
        self._key: list[str] = []
        self._value: list[str] = []
        self._is_bound = False  # the value has to name one of the functions
        self._scanner = ValueScanner()
        self._held_arguments: list[str] = []  # until the name is known
        self.has_arguments = False  # or a beginning of them

    @property
    def raw(self) -> str:
        """All it has read, until the call has begun."""
        return "".join(self._raw)

    def take(self, char: str) -> Scan:
        """NOT_OF_IT: no object that calls a function, from this character on."""
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
        # A string is the arguments' JSON as text, as OpenAI's own format has it: it is unescaped when it is whole.
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
    """Whether it begins no JSON string of one of `texts`; so it is one character longer than these at most."""
    return not any(f'"{text}"'.startswith("".join(beginning)) for text in texts)


def _text(value: Sequence[str]) -> str:
    """The text of a JSON string; "" of anything else, however deep."""
    if not value or value[0] != '"':
        return ""
    try:
        return str(json.loads("".join(value)))
    except ValueError:
        return ""
