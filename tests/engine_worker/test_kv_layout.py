"""The size of a KV block in bytes, by shape, dtype, and group."""

from typing import Any

import pytest

from engine_worker.kv.layout import KVGroup, KVLayout, kv_cache_dtype


def group(**changes: int | str) -> KVGroup:
    shape: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return KVGroup(**{**shape, **changes})


def test_layout_llama_8b_block_is_2_mib() -> None:
    layout = KVLayout(groups=(group(),), block_size=16)
    assert (layout.block_bytes, layout.token_bytes) == (2 * 2**20, 128 * 2**10)
    assert layout.pool_shape(layout.groups[0], 100) == (100, 32, 2, 8, 16, 128)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_layout_blocks_of_tokens_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert KVLayout(groups=(group(),), block_size=16).blocks_of(num_tokens) == num_blocks


def test_layout_kv_dtype_sets_block_bytes() -> None:
    in_float32 = KVLayout(groups=(group(dtype="float32"),), block_size=16)
    assert in_float32.block_bytes == 2 * KVLayout(groups=(group(),), block_size=16).block_bytes
    assert KVLayout(groups=(group(dtype="float8_e4m3fn"),), block_size=16).token_bytes == 64 * 2**10


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [
        ("auto", "float16"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp32", "float32"),
        ("float32", "float32"),
    ],
)
def test_kv_cache_dtype_accepts_aliases(wanted: str, dtype: str) -> None:
    assert kv_cache_dtype(wanted, "float16") == dtype
    assert kv_cache_dtype("fp8_e4m3", "float16") == kv_cache_dtype("fp8", "float16")


def test_layout_groups_must_have_equal_block_bytes() -> None:
    pair = KVLayout(groups=(group(num_layers=16), group(num_layers=16)), block_size=16)
    assert (pair.block_bytes, pair.token_bytes) == (2**20, 128 * 2**10)
    with pytest.raises(AssertionError, match="must have one size"):
        KVLayout(groups=(group(), group(num_layers=16)), block_size=16)
