"""Parser for tool calls whose arguments are XML-like elements, one per argument. Pure.

qwen3_coder   <tool_call><function=f><parameter=k>v</parameter></function></tool_call>
glm45         <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>

Values become JSON by the tool's schema (argument_values.py). Strings stream, other values wait for their end. A model
may omit an end tag: an argument also ends at the next one, and a call ends at the next call. A value that the token
limit cuts stays open, so that a client cannot take it for a whole one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.text.parsers.argument_values import Schema, json_text, json_value, value_types
from gateway.text.parsers.parts import Arguments, CallBegins, Content, Part, StepParser, first_tag, held_length

_NAME = re.compile(r"[\w.:/-]{1,256}")
_MAX_NAME_CHARS = 300  # of a function or an argument, with white space
_STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The tags of a format.

    Attributes:
        call: Before the function's name.
        name_ends: After the name. Only those in `kept` remain to be read.
        kept: Tags that end a name and begin what follows.
        key: Before an argument's name.
        key_end: After it.
        key_breaks: Texts that end an argument's name without `key_end`, and remain to be read.
        value: Between `key_end` and the value, after white space; "" if there is nothing.
        value_end: After the value.
        implied_ends: Tags that end a value without `value_end`, and remain to be read.
        call_end: After the last argument.
        outer: Tags around calls, or none.
        is_on_lines: Whether a line break after `key_end` and one before `value_end` are not part of the value.
    """

    call: str
    name_ends: tuple[str, ...]
    kept: tuple[str, ...] = ()
    key: str
    key_end: str
    key_breaks: tuple[str, ...] = ()
    value: str = ""
    value_end: str
    implied_ends: tuple[str, ...]
    call_end: str
    outer: tuple[str, str] | None = None
    is_on_lines: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.call, *self.outer[:1]) if self.outer else (self.call,)

    @property
    def value_ends(self) -> tuple[str, ...]:
        lines = (f"\n{self.value_end}",) if self.is_on_lines else ()
        return (*lines, self.value_end, *self.implied_ends)


QWEN3_CODER = CallTags(
    call="<function=",
    name_ends=(">",),
    key="<parameter=",
    key_end=">",
    key_breaks=("\n", "<"),
    value_end="</parameter>",
    implied_ends=("\n<parameter=", "\n</function>"),
    call_end="</function>",
    outer=("<tool_call>", "</tool_call>"),
    is_on_lines=True,
)
GLM45 = CallTags(
    call="<tool_call>",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    kept=("<arg_key>", "</tool_call>"),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    implied_ends=("<arg_key>", "</tool_call>"),
    call_end="</tool_call>",
)


class TaggedCalls(StepParser):
    def __init__(self, tags: CallTags, schemas: Mapping[str, Schema]) -> None:
        """Create a parser for one answer.

        Args:
            tags: Tags of the format.
            schemas: Parameter schema of each function of the request.
        """
        super().__init__(self._in_text)
        self._tags = tags
        self._schemas = schemas
        self._schema: Schema = {}
        self._since_start: list[str] = []  # tags and white space since the last text; content if no call follows
        self._has_called = False
        self._num_arguments = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # pieces of a value that is no string

    def finish(self) -> Iterator[Part]:
        if self._step == self._before_key:
            yield Arguments("}")
        elif self._step == self._in_value:
            yield from self._piece(self._buffer)
            if self._types != _STRING:
                yield Arguments(f'"{json_text("".join(self._value))}')
        elif self._step not in (self._in_key, self._before_value):
            yield Content("".join([*self._since_start, self._buffer]))

    def _in_text(self) -> Iterator[Part]:
        before, tag = self._text_before(self._tags.starts)
        yield Content(before)
        if tag:
            self._since_start, self._has_called = [tag], False
            self._step = self._in_name if tag == self._tags.call else self._before_call

    def _before_call(self) -> Iterator[Part]:
        """Read what stands between the outer tags and around calls."""
        tags = (*self._tags.starts, *(self._tags.outer or ())[1:])
        self._skip_white_space()
        tag = self._tag_here(tags)
        if tag == self._tags.call:
            self._since_start.append(tag)
            self._step = self._in_name
        elif tag and not self._has_called:
            self._since_start.append(tag)
        elif not tag and not self._waits and self._buffer:
            yield from self._no_call()

    def _skip_white_space(self) -> None:
        rest = self._buffer.lstrip()
        if not self._has_called:
            self._since_start.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest

    def _in_name(self) -> Iterator[Part]:
        place, tag = first_tag(self._buffer, self._tags.name_ends)
        name = self._buffer[:place].strip() if tag else ""
        if _NAME.fullmatch(name):
            self._buffer = self._buffer[place + (0 if tag in self._tags.kept else len(tag)) :]
            self._schema, self._num_arguments, self._has_called = self._schemas.get(name, {}), 0, True
            self._since_start, self._step = [], self._before_key
            yield CallBegins(name)
            yield Arguments("{")
        elif tag == "\n" and not name:
            self._since_start.append(self._buffer[: place + 1])
            self._buffer = self._buffer[place + 1 :]
        elif tag or len(self._buffer) > _MAX_NAME_CHARS:
            yield from self._no_call()
        else:
            self._waits = True

    def _no_call(self) -> Iterator[Part]:
        yield Content("".join(self._since_start))
        self._since_start, self._step = [], self._in_text

    def _before_key(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        tag = self._tag_here((self._tags.key, self._tags.call_end))
        if tag == self._tags.key:
            self._step = self._in_key
        elif tag or (self._buffer and not self._waits):  # without an end tag, the call ends at anything else
            self._after_space(self._before_call if self._tags.outer else self._in_text)
            yield Arguments("}")

    def _in_key(self) -> Iterator[Part]:
        place, tag = first_tag(self._buffer, (self._tags.key_end, *self._tags.key_breaks))
        if not tag and len(self._buffer) <= _MAX_NAME_CHARS:
            self._waits = True
            return
        place = place if tag else len(self._buffer)
        key = self._buffer[:place].strip()
        self._buffer = self._buffer[place + (0 if tag in self._tags.key_breaks else len(tag)) :]
        self._types, self._value = value_types(self._schema, key) or _STRING, []
        yield Arguments(f"{', ' if self._num_arguments else ''}{_quoted(key)}: ")
        self._num_arguments += 1
        self._step = self._before_value

    def _before_value(self) -> Iterator[Part]:
        if self._tags.value:
            self._buffer = self._buffer.lstrip()
            if not self._tag_here((self._tags.value,)) and (self._waits or not self._buffer):
                return
        elif self._tags.is_on_lines:
            self._buffer = self._buffer.removeprefix("\n")
        self._step = self._in_value
        if self._types == _STRING:
            yield Arguments('"')

    def _in_value(self) -> Iterator[Part]:
        ends = self._tags.value_ends
        place, tag = first_tag(self._buffer, ends)
        if not tag:
            certain = len(self._buffer) - max(held_length(self._buffer, end) for end in ends)
            piece, self._buffer, self._waits = self._buffer[:certain], self._buffer[certain:], True
            yield from self._piece(piece)
            return
        yield from self._piece(self._buffer[:place])
        self._buffer = self._buffer[place + (0 if tag in self._tags.implied_ends else len(tag)) :]
        yield Arguments('"' if self._types == _STRING else json_value("".join(self._value), self._types))
        self._step = self._before_key

    def _piece(self, text: str) -> Iterator[Part]:
        if self._types != _STRING:
            self._value.append(text)
        elif text:
            yield Arguments(json_text(text))


def _quoted(text: str) -> str:
    return f'"{json_text(text)}"'
