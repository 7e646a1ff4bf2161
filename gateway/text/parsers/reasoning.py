"""Parsers for reasoning between two tags at the start of an answer. Pure.

    qwen3, glm45   <think> ... </think>
    mistral        [THINK] ... [/THINK]
    gemma4         <|channel>thought ... <channel|>

A rendered prompt may already end with the first tag: then the answer begins inside the reasoning, and the model may
repeat the tag. The tags and the white space after them are dropped.
"""

from collections.abc import Iterator

from gateway.text.parsers.parts import Content, Part, Reasoning, StepParser

THINK, MISTRAL, GEMMA4 = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")


class ThinkTags(StepParser):
    def __init__(self, tags: tuple[str, str], *, begins_thinking: bool) -> None:
        super().__init__(self._at_start)
        self._begin, self._end = tags
        self._begins_thinking = begins_thinking
        self.has_thought = begins_thinking

    @property
    def is_over(self) -> bool:
        return self._step == self._in_content

    def finish(self) -> Iterator[Part]:
        is_thinking = self._step == self._thinking or (self._step == self._at_start and self._begins_thinking)
        yield Reasoning(self._buffer) if is_thinking else Content(self._buffer)

    def _at_start(self) -> Iterator[Part]:
        begun = self._buffer.lstrip()
        if begun.startswith(self._begin):
            self.has_thought = True
            self._buffer = begun[len(self._begin) :]
            self._after_space(self._thinking)
        elif self._begin.startswith(begun):
            self._waits = True
        elif self._begins_thinking:
            self._after_space(self._thinking)
        else:
            self._step = self._in_content
        yield from ()

    def _thinking(self) -> Iterator[Part]:
        before, end = self._text_before((self._end,))
        yield Reasoning(before)
        if end:
            self._after_space(self._in_content)

    def _in_content(self) -> Iterator[Part]:
        yield Content(self._buffer)
        self._buffer = ""


def think_tags(tags: tuple[str, str], prompt_end: str) -> ThinkTags:
    """Return a parser that begins inside the reasoning if the rendered prompt ends with the first tag."""
    return ThinkTags(tags, begins_thinking=prompt_end.rstrip().endswith(tags[0]))
