"""Parser for the tool calls of DeepSeek V3, R1, and V3.1. Pure.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                         (V3, R1)
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>     (V3.1)
"""

import re
from collections.abc import Iterator

from gateway.text.parsers.json_scanner import ValueScanner
from gateway.text.parsers.parts import Arguments, CallBegins, Content, Part, StepParser

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.:/-]{1,256}")
_MAX_HEAD_CHARS = 400
_FENCE = "```"


class DeepSeekCalls(StepParser):
    def __init__(self) -> None:
        super().__init__(self._in_text)
        self._since_mark = ""
        self._arguments = ValueScanner()
        self._has_called = False

    def finish(self) -> Iterator[Part]:
        if self._step not in (self._before_arguments, self._in_arguments):
            yield Content(self._since_mark + self._buffer)

    def _in_text(self) -> Iterator[Part]:
        before, mark = self._text_before((CALLS, CALL))
        yield Content(before)
        if mark:
            self._since_mark, self._has_called = mark, False
            self._step = self._in_head if mark == CALL else self._between_calls

    def _between_calls(self) -> Iterator[Part]:
        rest = self._buffer.lstrip()
        skipped, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
        if self._has_called and rest.startswith("`"):
            self._buffer = rest.lstrip("`")
            return
        tag = self._tag_here((CALL, CALL_END, CALLS_END))
        self._since_mark = "" if self._has_called else self._since_mark + skipped + tag
        if tag == CALL:
            self._since_mark = self._since_mark or tag
            self._step = self._in_head
        elif (tag == CALLS_END and not self._has_called) or (not tag and not self._waits and self._buffer):
            yield Content(self._since_mark)
            self._since_mark, self._step = "", self._in_text

    def _in_head(self) -> Iterator[Part]:
        head, separator, rest = self._buffer.partition(SEPARATOR)
        if not separator:
            if len(self._buffer) > _MAX_HEAD_CHARS:
                yield from self._no_call()
            else:
                self._waits = True
            return
        name, after = head.strip(), rest
        if name == "function":
            name, line_end, after = rest.partition("\n")
            name = name.strip()
            if not line_end and len(rest) <= _MAX_HEAD_CHARS:
                self._waits = True
                return
        if _NAME.fullmatch(name):
            self._buffer, self._since_mark, self._has_called = after, "", True
            self._arguments, self._step = ValueScanner(), self._before_arguments
            yield CallBegins(name)
        else:
            yield from self._no_call()

    def _no_call(self) -> Iterator[Part]:
        yield Content(self._since_mark)
        self._since_mark, self._step = "", self._in_text

    def _before_arguments(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        is_fence = self._buffer.startswith(_FENCE) or (self._buffer and _FENCE.startswith(self._buffer))
        line_end = self._buffer.find("\n", 0, _MAX_HEAD_CHARS)
        if is_fence and line_end >= 0:
            self._buffer = self._buffer[line_end + 1 :]
        elif is_fence and len(self._buffer) < _MAX_HEAD_CHARS:
            self._waits = True
        elif self._buffer.startswith("{"):
            self._step = self._in_arguments
        elif self._buffer:
            yield Arguments("{}")
            self._step = self._between_calls

    def _in_arguments(self) -> Iterator[Part]:
        end = self._arguments.end_in(self._buffer)
        yield Arguments(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._step = self._between_calls
