"""The Triton KV store against its reference: bytes are moved, so the whole pool must be equal, NaN included."""

import pytest
import torch

from kernels.kv_cache_store import store_kv_reference, store_kv_triton


def store(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(slots))
    num_blocks = 6
    pool = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    expected = pool.clone()
    qkv = torch.randn(len(slots), 4 + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    key, value = qkv[:, 4:].chunk(2, dim=1)
    for launch, target in ((store_kv_triton, pool), (store_kv_reference, expected)):
        launch(key, value, target[:, 1, 0], target[:, 1, 1], torch.tensor(slots, dtype=torch.int64))
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    # The reference itself: each slot holds its token, and exactly the named slots changed.
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            assert torch.equal(pool[block, 1, 0, :, offset], key[token])
            assert torch.equal(pool[block, 1, 1, :, offset], value[token])
    written = sum(slot >= 0 for slot in slots)
    assert pool.isfinite().sum() == written * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 64), (8, 128), (2, 80)])
def test_scattered_slots_and_padding(block_size: int, num_kv_heads: int, head_dim: int) -> None:
    last = 6 * block_size - 1
    store(num_kv_heads, block_size, head_dim, torch.float16, [last, -1, 0, block_size, 2 * block_size - 1, -1, 3])


def test_no_tokens_and_padding_alone_write_nothing() -> None:
    store(2, 16, 64, torch.float32, [])
    store(2, 16, 64, torch.float32, [-1, -1])
