"""`--kv-cache-dtype auto`: bfloat16 where products of 4 and 8 bits are what makes a model compute in float32."""

from pathlib import Path
from typing import Any

import pytest

from engine_worker.execution.kv_dtype_choice import chosen_kv_cache_dtype
from engine_worker.execution.settings import IN_GROUPS, ExecutionSettings


def chosen(saved: str = "bfloat16", **options: Any) -> tuple[str, bool]:
    """Return what is taken, and whether it is told."""
    choice = chosen_kv_cache_dtype(ExecutionSettings(model=Path("/none"), **options), saved)
    return choice.kv_cache_dtype, choice.reason.startswith("--kv-cache-dtype auto is bfloat16: ")


@pytest.mark.parametrize("quantization", IN_GROUPS)
@pytest.mark.parametrize("saved", ["bfloat16", "float16"])
def test_products_of_few_bits_have_keys_in_16(quantization: str, saved: str) -> None:
    assert chosen(saved, quantization=quantization) == ("bfloat16", True)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"saved": "float32"},
        {"quantization": "none"},
        {"quantization": "auto"},
        {"quantization": "fp8"},
    ],
)
def test_else_keys_are_as_the_model_computes(options: dict[str, Any]) -> None:
    assert chosen(**{"quantization": "as-stored", **options}) == ("auto", False)


@pytest.mark.parametrize("word", ["float32", "fp32", "bf16", "fp8"])
def test_what_is_named_is_kept(word: str) -> None:
    assert chosen(quantization="int8", kv_cache_dtype=word) == (word, False)
