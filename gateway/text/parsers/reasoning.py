"""Parsers for reasoning between <think> and </think>. Pure.

    qwen3         text between the tags, if the answer starts with <think>
    deepseek_r1   everything up to </think>; the prompt already ends with <think>, and the model may repeat it

The tags and the white space after them are dropped.
"""

from collections.abc import Callable, Iterator

from gateway.text.parsers.parts import Content, Part, Reasoning, ReasoningParser, StepParser

_BEGIN, _END = "<think>", "</think>"


class ThinkTags(StepParser):
    def __init__(self, *, begins_thinking: bool) -> None:
        super().__init__(self._at_start)
        self._begins_thinking = begins_thinking
        self.has_thought = begins_thinking

    @property
    def is_over(self) -> bool:
        return self._step in (self._before_content, self._in_content)

    def finish(self) -> Iterator[Part]:
        is_thinking = self._step == self._thinking or (self._step == self._at_start and self._begins_thinking)
        yield Reasoning(self._buffer) if is_thinking else Content(self._buffer)

    def _at_start(self) -> Iterator[Part]:
        begun = self._buffer.lstrip()
        if begun.startswith(_BEGIN):
            self.has_thought = True
            self._buffer, self._step = begun[len(_BEGIN) :], self._before_reasoning
        elif _BEGIN.startswith(begun):
            self._waits = True
        else:
            self._step = self._before_reasoning if self._begins_thinking else self._in_content
        yield from ()

    def _before_reasoning(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._thinking
        yield from ()

    def _thinking(self) -> Iterator[Part]:
        before, is_end = self._text_before(_END)
        yield Reasoning(before)
        if is_end:
            self._step = self._before_content

    def _before_content(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._in_content
        yield from ()

    def _in_content(self) -> Iterator[Part]:
        yield Content(self._buffer)
        self._buffer = ""


# value of --reasoning-parser -> factory
REASONING_PARSERS: dict[str, Callable[[], ReasoningParser]] = {
    "qwen3": lambda: ThinkTags(begins_thinking=False),
    "deepseek_r1": lambda: ThinkTags(begins_thinking=True),
}
