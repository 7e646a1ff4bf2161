"""The kind of answers of OpenAI's text completions."""

from collections.abc import Mapping
from typing import Any

from gateway.apis.completions.format import CompletionFormat
from gateway.apis.completions.schema import CompletionBody, parse_completion
from gateway.pipeline.answer_kind import SOME_TEXT, AnswerKind, stored_fields


def _short_prompt(prompt: Any, given: Mapping[str, Any]) -> Any:
    """Keep the number of prompts, and with `echo` their texts."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return prompt if given.get("echo") else SOME_TEXT if is_one else [SOME_TEXT] * len(prompt)


COMPLETION = AnswerKind(
    "text_completion",
    parse_completion,
    CompletionFormat,
    stored_fields(CompletionBody),
    {"prompt": _short_prompt},
    ids="prompt",
)
