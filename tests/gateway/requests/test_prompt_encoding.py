"""A prompt that must be too long is refused by its number of characters, without the cost of tokenization."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from gateway.errors import InvalidRequest
from gateway.pipeline.plan import encode_prompt
from gateway.text.served_model import ModelLimits


def encodes(text: str, **options: Any) -> NoReturn:
    raise AssertionError(f"{len(text)} characters were encoded")


def test_text_that_must_be_too_long_is_not_encoded() -> None:
    model: Any = SimpleNamespace(
        encoder=SimpleNamespace(min_num_tokens=lambda text: len(text) // 4, encode_text=encodes)
    )
    limits = ModelLimits(max_model_len=16, vocab_size=100)
    with pytest.raises(InvalidRequest) as refused:
        encode_prompt(model, limits, "word" * 16, "prompt", add_special_tokens=True)
    assert refused.value.param == "prompt"
    with pytest.raises(AssertionError, match="60 characters were encoded"):
        encode_prompt(model, limits, "word" * 15, "prompt", add_special_tokens=True)
