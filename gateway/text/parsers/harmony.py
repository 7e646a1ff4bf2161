"""Parser for harmony, the message format of gpt-oss. Pure.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The channel `analysis` is reasoning; a message with a recipient is a call, in any channel; all else is content. The
prompt ends with <|start|>assistant, so an answer begins with the rest of a header.

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from collections.abc import Iterator

from gateway.text.parsers.parts import Arguments, CallBegins, Content, Part, Reasoning, StepParser

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
_HEADER_STARTS = (*SPECIAL_TOKENS, "to=")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER_CHARS = 600


class Harmony(StepParser):
    """A parser of reasoning, calls, and content in one."""

    def __init__(self, prompt_end: str = "") -> None:
        """Create a parser for one answer.

        Args:
            prompt_end: The end of the rendered prompt; it may hold the beginning of the answer's header.
        """
        super().__init__(self._at_start)
        self._header = ""
        self._channel = "final"
        self._is_call = False
        self._has_arguments = False
        self.has_thought = False
        begun = prompt_end[prompt_end.rfind(START) :] if START in prompt_end else ""
        if MESSAGE in begun:
            header, _, text = begun.partition(MESSAGE)
            if not any(end in text for end in _ENDS):
                list(self._opened(header))
        elif CHANNEL in begun:
            self._header, self._step = begun[len(START) :], self._in_header

    @property
    def is_over(self) -> bool:
        return self._step == self._in_message and self._channel == "final"

    def finish(self) -> Iterator[Part]:
        if self._step == self._in_message:
            yield self._part(self._buffer)
            yield from self._closed()
        elif self._buffer.strip() and not self._buffer.lstrip().startswith(SPECIAL_TOKENS):
            yield Content(self._buffer)

    def _at_start(self) -> Iterator[Part]:
        """Distinguish a header from text of a model that does not follow the format."""
        text = self._buffer = self._buffer.lstrip()
        if text.startswith(_HEADER_STARTS):
            self._step = self._in_header
        elif not text or any(start.startswith(text) for start in _HEADER_STARTS):
            self._waits = True
        else:
            self._channel, self._is_call, self._step = "final", False, self._in_message
        yield from ()

    def _in_header(self) -> Iterator[Part]:
        header, message, rest = self._buffer.partition(MESSAGE)
        if message:
            self._buffer = rest
            yield from self._opened(self._header + header)
        elif len(self._buffer) > _MAX_HEADER_CHARS:  # no header after all
            self._channel, self._is_call, self._step = "final", False, self._in_message
            yield Content(self._buffer)
            self._buffer = ""
        else:
            self._waits = True

    def _opened(self, header: str) -> Iterator[Part]:
        channels, recipient = _CHANNEL.findall(header), _RECIPIENT.search(header)
        self._header, self._channel = "", channels[-1] if channels else "final"
        self._is_call, self._has_arguments = recipient is not None, False
        self.has_thought = self.has_thought or (self._channel == "analysis" and not self._is_call)
        self._step = self._in_message
        if recipient:
            yield CallBegins(recipient[1].removeprefix("functions."))

    def _in_message(self) -> Iterator[Part]:
        before, end = self._text_before(_ENDS)
        if before:
            yield self._part(before)
        if end:
            yield from self._closed()
            self._buffer = end + self._buffer if end in (START, CHANNEL) else self._buffer
            self._step = self._at_start

    def _part(self, text: str) -> Part:
        if self._is_call:
            self._has_arguments = self._has_arguments or bool(text.strip())
            return Arguments(text)
        return Reasoning(text) if self._channel == "analysis" else Content(text)

    def _closed(self) -> Iterator[Part]:
        if self._is_call and not self._has_arguments:
            yield Arguments("{}")
        self._is_call = False
