"""`--kv-cache-dtype auto`: bfloat16 when 4-bit or 8-bit linear layers make the model compute in float32."""

from pathlib import Path
from typing import Any

import pytest

from engine_worker.execution.load.kv_dtype_choice import chosen_kv_cache_dtype
from engine_worker.execution.settings import IN_GROUPS, ExecutionSettings


def chosen(saved: str = "bfloat16", **options: Any) -> tuple[str, bool]:
    """Return the KV dtype and whether it is logged."""
    choice = chosen_kv_cache_dtype(ExecutionSettings(model=Path("/none"), **options), saved)
    return choice.kv_cache_dtype, choice.reason.startswith("--kv-cache-dtype auto is bfloat16: ")


@pytest.mark.parametrize("quantization", IN_GROUPS)
@pytest.mark.parametrize("saved", ["bfloat16", "float16"])
def test_kv_dtype_auto_few_bit_weights_use_bfloat16(quantization: str, saved: str) -> None:
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
def test_kv_dtype_auto_otherwise_follows_model(options: dict[str, Any]) -> None:
    assert chosen(**{"quantization": "as-stored", **options}) == ("auto", False)


@pytest.mark.parametrize("word", ["float32", "fp32", "bf16", "fp8"])
def test_kv_dtype_explicit_is_kept(word: str) -> None:
    assert chosen(quantization="int8", kv_cache_dtype=word) == (word, False)
