"""Parser for the tool calls of Gemma 4. Pure.

    <|tool_call>call:f{text:<|"|>v<|"|>,number:3,list:[<|"|>a<|"|>],object:{key:true}}<tool_call|>

The notation is converted to JSON while it arrives. The model also writes <|"|> for a quote inside a string: it ends the
string only where the notation can continue after it. Inside lists and objects the model sometimes writes JSON or Python
strings, which are converted too. After its thoughts it may omit the first marker (vLLM issue 54256).
"""

import json
import re
from collections.abc import Collection, Iterator

from gateway.text.parsers.argument_values import json_text
from gateway.text.parsers.parts import Arguments, CallBegins, Content, Part, StepParser, held_length

MARK, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([\w.:/-]{1,256})\s*\{")
_MAX_HEAD_CHARS = 300
_KEY = re.compile(r"""\s*,\s*(?:<\|"\|>|["'])?[\w.$ -]{1,128}(?:<\|"\|>|["'])?\s*:""")
_MAX_KEY_CHARS = 160
_MAX_WORD_CHARS = 1024  # of a key or a value without quotes
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", '"': '\\"', "\\": "\\\\", "/": "/", "'": "'"}


class Gemma4Calls(StepParser):
    def __init__(self, functions: Collection[str]) -> None:
        """Create a parser for one answer.

        Args:
            functions: Names of the tools in the request. At the start of the answer, and after a call, such a call
                needs no marker.
        """
        super().__init__(self._at_start)
        self._starts = tuple(f"call:{name}{{" for name in functions)
        self._since_mark = ""
        self._closers: list[str] = []  # of the open objects and lists
        self._quote = ""  # the end of the current string
        self._has_members = False
        self._is_over = False  # no text follows

    def finish(self) -> Iterator[Part]:
        self._is_over, self._waits = True, False
        while self._buffer and not self._waits:
            yield from self._step()
        if self._step in (self._at_start, self._in_text, self._in_head, self._after_call):
            yield Content(self._since_mark + self._buffer)

    def _at_start(self) -> Iterator[Part]:
        text = self._buffer.lstrip()
        yield Content(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        if text.startswith(self._starts):
            self._since_mark, self._step = "", self._in_head
        elif not self._is_over and any(start.startswith(text) for start in (*self._starts, MARK)):
            self._waits = True
        else:
            self._step = self._in_text

    def _in_text(self) -> Iterator[Part]:
        before, mark = self._text_before((MARK,))
        yield Content(before)
        if mark:
            self._since_mark, self._step = mark, self._in_head
        elif self._is_over:
            yield Content(self._buffer)
            self._buffer = ""

    def _in_head(self) -> Iterator[Part]:
        head = _HEAD.match(self._buffer)
        if head:
            self._buffer, self._since_mark = self._buffer[head.end() :], ""
            self._closers, self._has_members, self._step = ["}"], False, self._before_member
            yield CallBegins(head[1])
            yield Arguments("{")
        elif "{" in self._buffer or len(self._buffer) > _MAX_HEAD_CHARS or self._is_over:
            yield Content(self._since_mark)
            self._since_mark, self._step = "", self._in_text
        else:
            self._waits = True

    def _before_member(self) -> Iterator[Part]:
        """Read up to a key, up to a list's value, or the end of an object or a list."""
        self._buffer = self._buffer.lstrip(", \t\r\n")
        if not self._buffer:
            return
        if self._buffer[0] in "}]":
            self._buffer = self._buffer[1:]
            yield Arguments(self._closers.pop())
            self._has_members = True
            self._step = self._before_member if self._closers else self._after_call
        elif self._buffer.startswith(END):  # the model forgot a bracket
            yield Arguments("".join(reversed(self._closers)))
            self._closers.clear()
            self._step = self._after_call
        elif not self._is_over and END.startswith(self._buffer):
            self._waits = True
        else:
            yield Arguments(", " if self._has_members else "")
            self._step = self._in_key if self._closers[-1] == "}" else self._before_value

    def _in_key(self) -> Iterator[Part]:
        key, colon, rest = self._buffer.partition(":")
        if not colon and len(key) <= _MAX_WORD_CHARS and not self._is_over:
            self._waits = True
            return
        self._buffer = rest
        yield Arguments(f"{json.dumps(key.replace(QUOTE, '').strip().strip(chr(34) + chr(39)), ensure_ascii=False)}: ")
        self._step = self._before_value

    def _before_value(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        first = self._buffer[:1]
        if self._buffer.startswith(QUOTE) or first in ('"', "'"):
            self._quote = QUOTE if first == "<" else first
            self._buffer = self._buffer[len(self._quote) :]
            self._step = self._in_string if self._quote == QUOTE else self._in_quoted
            yield Arguments('"')
        elif not self._is_over and first == "<" and QUOTE.startswith(self._buffer):
            self._waits = True
        elif first and first in "{[":
            self._buffer = self._buffer[1:]
            self._closers.append("}" if first == "{" else "]")
            self._has_members, self._step = False, self._before_member
            yield Arguments(first)
        elif first:
            self._step = self._in_word

    def _in_word(self) -> Iterator[Part]:
        """Read a number, true, false, null, or a string without quotes."""
        end = next((place for place, char in enumerate(self._buffer) if char in ",}]<"), None)
        if end is None and len(self._buffer) <= _MAX_WORD_CHARS and not self._is_over:
            self._waits = True
            return
        end = len(self._buffer) if end is None else end
        word, self._buffer = self._buffer[:end].strip(), self._buffer[end:]
        is_number = _NUMBER.fullmatch(word) is not None
        yield Arguments(word if is_number else _WORDS.get(word) or json.dumps(word, ensure_ascii=False))
        self._has_members, self._step = True, self._before_member

    def _in_string(self) -> Iterator[Part]:
        place = self._buffer.find(QUOTE)
        held = 0 if self._is_over else held_length(self._buffer, QUOTE)
        certain = place if place >= 0 else len(self._buffer) - held
        yield Arguments(json_text(self._buffer[:certain]))
        self._buffer = self._buffer[certain:]
        is_end = self._ends_string(self._buffer[len(QUOTE) :]) if place >= 0 else None
        if is_end is None:
            self._waits = True
            return
        self._buffer = self._buffer[len(QUOTE) :]
        yield Arguments('"' if is_end else '\\"')
        if is_end:
            self._has_members, self._step = True, self._before_member

    def _ends_string(self, after: str) -> bool | None:
        """Return whether a quote before `after` ends the string, or None if that is not certain yet."""
        rest = after.lstrip()
        if not rest:
            return True if self._is_over else None if len(after) < _MAX_KEY_CHARS else False
        if rest.startswith(END):
            return True
        if rest[0] == self._closers[-1]:
            return self._ends_container(rest[1:])
        if rest[0] == ",":
            return self._begins_member(after)
        return None if not self._is_over and END.startswith(rest) else False

    def _ends_container(self, after: str) -> bool | None:
        """Return whether the text after a closing bracket continues the notation."""
        rest = after.lstrip()
        if not rest:
            return True if self._is_over else None
        follows = END[0] if len(self._closers) == 1 else ",}]<"
        return rest[0] in follows

    def _begins_member(self, after: str) -> bool | None:
        """Return whether the text, which begins with a comma, goes on with another value or key."""
        if self._closers[-1] == "]":
            rest = after.lstrip()[1:].lstrip()
            return (rest[0] in "<\"'{[-tfnTFN" or rest[0].isdigit()) if rest else None
        if _KEY.match(after):
            return True
        could_become_key = re.fullmatch(r"""\s*,\s*(?:<[|"]*>?|["'])?[\w.$ -]*(?:<[|"]*>?|["'])?\s*""", after)
        return None if could_become_key and len(after) < _MAX_KEY_CHARS and not self._is_over else False

    def _in_quoted(self) -> Iterator[Part]:
        """Read a string in JSON or Python notation."""
        written, place = [], 0
        while place < len(self._buffer):
            char = self._buffer[place]
            if char == "\\":
                if place + 1 == len(self._buffer):
                    break
                following = self._buffer[place + 1]
                written.append("\\u" if following == "u" else _ESCAPES.get(following, json_text("\\" + following)))
                place += 2
            elif char == self._quote:
                self._buffer = self._buffer[place + 1 :]
                yield Arguments("".join(written) + '"')
                self._has_members, self._step = True, self._before_member
                return
            else:
                written.append(json_text(char))
                place += 1
        self._buffer, self._waits = self._buffer[place:], True
        yield Arguments("".join(written))

    def _after_call(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(END):
            self._buffer = self._buffer[len(END) :]
        elif not self._is_over and END.startswith(self._buffer):
            self._waits = True
        elif self._buffer:
            self._step = self._at_start
        yield from ()
