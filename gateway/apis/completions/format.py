"""The format of text completions: chunks and bodies. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.pipeline.response_format import NO_PROMPT, NOTHING, Body, ChoiceResult, ChunkFormat, UsageCount
from gateway.text.logprobs import completion_logprobs


class CompletionFormat(ChunkFormat):
    chunk_object = "text_completion"
    body_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_in_choice = True
    before_text = '"text":'
    after_text = ',"logprobs":null,"finish_reason":null}'

    def body(self, choices: Iterable[ChoiceResult], usage: UsageCount, extra: Mapping[str, Any] = NOTHING) -> Body:
        return self._body((self._choice(choice, text=choice.text, **NO_PROMPT) for choice in choices), usage, extra)

    logprobs = staticmethod(completion_logprobs)

    @staticmethod
    def last_content(text: str) -> dict[str, Any]:
        return {"text": text}
