"""A causal depthwise convolution over inputs in a paged cache, in torch.

Every filter reads its inputs from the cache, also those of the same step. So an output has the same bits whatever the
step's chunks are.
"""

import torch
from torch import Tensor


def window_slots(
    block_table: Tensor, query_start_loc: Tensor, positions: Tensor, block_size: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return where the inputs of each token are.

    Args:
        block_table: [S, B], block ids.
        query_start_loc: [S + 1], first token of each sequence in T.
        positions: [T], position of each token in its sequence.
        block_size: Tokens per block.
        width: Inputs per token: its own and those before it.

    Returns:
        Slots [T, width] int64, oldest first, and [T, width] bool: before the sequence's start, so the input is 0.
    """
    rows = torch.repeat_interleave(torch.arange(len(block_table), device=positions.device), query_start_loc.diff())
    wanted = positions[:, None] - torch.arange(width - 1, -1, -1, device=positions.device)
    found = wanted.clamp(min=0)
    slots = block_table[rows[:, None], found // block_size].long() * block_size + found % block_size
    return slots, wanted < 0


def store_inputs(cache: Tensor, slots: Tensor, inputs: Tensor) -> None:
    """Store inputs [T, 2 * Hkv * D] of tokens at `slots` [T] of cache [num_blocks, 2, Hkv, BS, D]."""
    block_size = cache.shape[3]
    cache[slots // block_size, :, :, slots % block_size] = inputs.view(len(inputs), 2, *cache.shape[2::2]).to(
        cache.dtype
    )


def read_inputs(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the inputs [T, width, 2 * Hkv * D] at `slots` [T, width]."""
    block_size = cache.shape[3]
    return cache[slots // block_size, :, :, slots % block_size].flatten(2)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [T, C] float32: each channel's filter over its inputs, in ascending order.

    Args:
        inputs: [T, width, C], oldest first.
        weight: [C, width].
        bias: [C], or None.
    """
    exact, taps = inputs.float(), weight.float()
    total = exact[:, 0] * taps[:, 0]
    for tap in range(1, weight.shape[1]):
        total += exact[:, tap] * taps[:, tap]
    return total if bias is None else total.add_(bias.float())
