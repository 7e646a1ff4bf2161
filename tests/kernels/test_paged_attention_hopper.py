"""Rules of the Hopper attention kernels that need no GPU: supported shapes, and their view of the pool."""

import pytest
import torch

from kernels.attention.pool_rows import PoolRows, supports_tma
from kernels.attention.prefill_hopper import heads_at_once


def caches(block_size: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return layer 1 of 3; a meta tensor replaces one on a Hopper GPU."""
    pool = torch.empty(40, 3, 2, 2, block_size, head_dim, dtype=dtype, device="meta")
    return pool[:, 1, 0], pool[:, 1, 1]


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "num_heads", "suits"),
    [
        (16, 128, torch.bfloat16, 8, True),
        (8, 64, torch.float16, 2, True),
        (128, 128, torch.bfloat16, 32, True),
        (16, 128, torch.float8_e4m3fn, 32, True),
        (64, 64, torch.float8_e4m3fn, 9, True),
        (16, 96, torch.float8_e4m3fn, 8, False),
        (16, 128, torch.float32, 8, False),  # the kernels multiply in half precision
        (16, 80, torch.bfloat16, 8, False),  # not a multiple of 64
        (16, 128, torch.bfloat16, 34, False),  # 17 query heads per KV head exceed a tile's rows
        (4, 128, torch.bfloat16, 8, False),  # a copy of fewer than 8 slots has no swizzle
    ],
)
def test_hopper_path_serves_supported_shapes(
    block_size: int, head_dim: int, dtype: torch.dtype, num_heads: int, suits: bool
) -> None:
    assert supports_tma(caches(block_size, head_dim, dtype)[0], num_heads) is suits


def test_hopper_path_refuses_other_devices() -> None:
    assert not supports_tma(torch.empty(4, 2, 16, 128, dtype=torch.bfloat16), 8)


def test_pool_rows_map_to_pool_slots() -> None:
    pool = torch.arange(40 * 3 * 2 * 2 * 16 * 64).view(40, 3, 2, 2, 16, 64)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    rows = PoolRows(keys, values)
    flat = keys.as_strided((rows.num_rows, 64), (64, 1))
    for block, head, slot in ((0, 0, 0), (7, 1, 3), (39, 1, 15)):
        row = block * rows.block_rows + head * rows.head_rows + slot
        assert torch.equal(flat[row], keys[block, head, slot])
        assert torch.equal(flat[row + rows.value_rows], values[block, head, slot])
    # The last value is the last row; the row after it, which reads as zeros, is outside the layer.
    assert rows.num_rows == 39 * rows.block_rows + rows.head_rows + 15 + rows.value_rows + 1


def test_e4m3_pool_is_viewed_as_pairs() -> None:
    codes = torch.randint(256, (5, 3, 2, 2, 16, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    pool = codes.view(torch.float8_e4m3fn)
    keys, values = (pool[:, 1, which].view(torch.int16) for which in range(2))
    rows = PoolRows(keys, values)
    flat = keys.as_strided((rows.num_rows, 32), (32, 1))
    pair = flat[3 * rows.block_rows + rows.head_rows + 5 + rows.value_rows][7]
    # The even element is in the low byte, as the kernel unpacks it.
    assert int(pair) & 0xFF == int(codes[3, 1, 1, 1, 5, 14]) and int(pair) >> 8 & 0xFF == int(codes[3, 1, 1, 1, 5, 15])


@pytest.mark.parametrize(("max_tiles", "heads"), [(1, 8), (33, 8), (65, 4), (129, 2), (257, 1)])
def test_concurrent_heads_fill_the_device(max_tiles: int, heads: int) -> None:
    assert heads_at_once(8, max_tiles, 132) == heads


def test_concurrent_heads_divide_the_heads() -> None:
    assert heads_at_once(6, 40, 132) == 6
    assert heads_at_once(3, 100, 132) == 3
    assert heads_at_once(3, 200, 132) == 1
