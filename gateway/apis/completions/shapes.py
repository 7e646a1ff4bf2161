"""The shapes of text completions, for the API description; format.py writes the bytes."""

from typing import Any, Literal

import msgspec

from gateway.pipeline.usage_shapes import UsageBody


class TextChoiceBody(msgspec.Struct, kw_only=True):
    index: int
    text: str
    prompt_logprobs: list[Any] | None  # null unless requested
    prompt_token_ids: list[int] | None
    logprobs: dict[str, Any] | None
    finish_reason: str


class TextCompletionBody(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str  # of the model's files and the release
    choices: list[TextChoiceBody]
    usage: UsageBody
