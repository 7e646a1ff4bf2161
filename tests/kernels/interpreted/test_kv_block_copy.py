"""The Triton block copy against its reference: the whole pool is equal bit for bit."""

import pytest
import torch

from kernels.kv_block_copy import copy_kv_blocks_reference, copy_kv_blocks_triton


@pytest.mark.parametrize("block_shape", [(2, 2, 3, 8, 64), (1, 2, 8, 64, 128), (5,)])
@pytest.mark.parametrize("pairs", [[(1, 2)], [(0, 7), (3, 4), (0, 5)], []])
def test_only_named_blocks_are_copied(block_shape: tuple[int, ...], pairs: list[tuple[int, int]]) -> None:
    pool = torch.randn(8, *block_shape, generator=torch.Generator().manual_seed(0)).half()
    pool[6] = torch.nan
    before, expected = pool.clone(), pool.clone()
    copies = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
    copy_kv_blocks_triton(pool, pool, copies)
    copy_kv_blocks_reference(expected, expected, copies)
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)
    sources = {destination: source for source, destination in pairs}
    for block in range(8):
        torch.testing.assert_close(pool[block], before[sources.get(block, block)], rtol=0, atol=0, equal_nan=True)


def test_blocks_are_gathered_into_another_buffer() -> None:
    pool, staging = torch.arange(8 * 6.0).view(8, 2, 3), torch.zeros(3, 2, 3)
    copy_kv_blocks_triton(pool, staging, torch.tensor([(5, 0), (1, 2)]))
    assert torch.equal(staging, torch.stack([pool[5], torch.zeros(2, 3), pool[1]]))
