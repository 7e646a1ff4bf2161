"""Parsers for reasoning between two tags at the start of an answer. Pure.

    qwen3, glm45   <think> ... </think>
    mistral        [THINK] ... [/THINK]
    gemma4         <|channel>thought ... <channel|>

A rendered prompt may already end with the first tag: then the answer begins inside the reasoning, and the model may
repeat the tag. The tags and the white space after them are dropped.

Some models call a tool without ending the reasoning (vLLM issue 39056). Text from the start of a call is held back: if
the end tag follows, it is reasoning; if the answer ends, it is content, in which the calls are found.
"""

from collections.abc import Iterator

from gateway.text.parsers.parts import Content, Part, Reasoning, StepParser

THINK, MISTRAL, GEMMA4 = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")


class ThinkTags(StepParser):
    def __init__(self, tags: tuple[str, str], *, begins_thinking: bool, call_mark: str = "") -> None:
        """Create a parser; `call_mark`: the start of a call, if tools are offered."""
        super().__init__(self._at_start)
        self._begin, self._end = tags
        self._call_mark = call_mark
        self._held: list[str] = []  # text from the start of a call
        self._begins_thinking = begins_thinking
        self.has_thought = begins_thinking

    @property
    def is_over(self) -> bool:
        return self._step == self._in_content

    def finish(self) -> Iterator[Part]:
        if self._held:
            yield Content("".join(self._held) + self._buffer)
            return
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
        before, tag = self._text_before((self._end, self._call_mark) if self._call_mark else (self._end,))
        yield Reasoning(before)
        if tag == self._end:
            self._after_space(self._in_content)
        elif tag:
            self._held.append(tag)
            self._step = self._perhaps_calling

    def _perhaps_calling(self) -> Iterator[Part]:
        before, end = self._text_before((self._end,))
        self._held.append(before)
        if end:
            yield Reasoning("".join(self._held))
            self._held.clear()
            self._after_space(self._in_content)

    def _in_content(self) -> Iterator[Part]:
        yield Content(self._buffer)
        self._buffer = ""


def think_tags(tags: tuple[str, str], prompt_end: str, call_mark: str) -> ThinkTags:
    """Return a parser that begins inside the reasoning if the rendered prompt ends with the first tag."""
    return ThinkTags(tags, begins_thinking=prompt_end.rstrip().endswith(tags[0]), call_mark=call_mark)
