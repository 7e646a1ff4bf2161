"""The body of many choices is put together in place, choice by choice: at one time it would keep the interpreter."""

import json
import weakref
from collections.abc import Iterator

import msgspec
import pytest

from gateway.answers.openai_response import ChatFormat, ChoiceResult, CompletionFormat, UsageCount

NUM_CHOICES = 8


class Told(msgspec.Struct, weakref=True):
    """Stands in a choice, and is there until that is written."""

    number: int


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_a_choice_that_is_written_is_let_go_of(form: type[ChatFormat | CompletionFormat]) -> None:
    alive: list[weakref.ref[Told]] = []

    def choices() -> Iterator[ChoiceResult]:
        for index in range(NUM_CHOICES):
            assert sum(told() is not None for told in alive) <= 1
            told = Told(index)
            alive.append(weakref.ref(told))
            yield ChoiceResult(index, f"text {index}", "length", extra={"told": told})

    body = json.loads(form("id", "model").body(choices(), UsageCount(1, 2), {"more": True}))
    assert [choice["index"] for choice in body["choices"]] == list(range(NUM_CHOICES))
    assert body["usage"]["total_tokens"] == 3
    assert body["more"] is True
    assert body["object"] == form.body_object
