"""Tiles of prefill on an H200 (132 SMs), 4 query heads per KV head, 32 query heads."""

import pytest
import torch

from kernels.attention.prefill import LARGE_TILES, SMALL_TILES, WIDE_TILES, PrefillConfig, prefill_config


@pytest.mark.parametrize(
    ("lengths", "tiles"),
    [
        ([1024], SMALL_TILES),  # one large tile per SM: the last would run alone
        ([1583], SMALL_TILES),
        ([1584], LARGE_TILES),  # 1584 tokens x 32 heads = 1.5 x 132 tiles of 256 rows
        ([512] * 16, LARGE_TILES),
        ([255] * 64, SMALL_TILES),  # tiles of 64 tokens would be a quarter empty
    ],
)
def test_large_tiles_are_used_when_they_fill_the_gpu(lengths: list[int], tiles: PrefillConfig) -> None:
    assert prefill_config(torch.bfloat16, 128, sum(lengths) * 32, max(lengths) * 4, 132) == tiles


@pytest.mark.parametrize("num_tokens", [2, 16, 8192])
def test_wide_heads_use_tiles_that_fit(num_tokens: int) -> None:
    assert prefill_config(torch.bfloat16, 256, num_tokens * 8, num_tokens * 2, 132) == WIDE_TILES
