"""Checks of the Triton short convolution against torch, for any device."""

import torch
from torch import Tensor

from kernels.short_conv import convolve, read_inputs, store_inputs, window_slots
from kernels.short_conv_triton import ConvolvedTokens, sequences_of, short_conv_triton

BLOCK_SIZE, WIDTH, NUM_TOKENS = 8, 4, 29
CHANNELS = 10  # of at most 12 in a cache of 2 * 2 heads of 3
TABLE = [[4, 2, 5, 1], [3, 7, 6, 0]]
CHUNKS = (1, 3, 8, NUM_TOKENS)


def draw(*size: int, seed: int, device: str) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device)


def run(chunk: int, device: str, *, has_bias: bool = True) -> tuple[Tensor, Tensor]:
    """Convolve two sequences in chunks, and return the outputs of Triton and of torch.

    The second sequence is always one token behind.
    """
    wide = draw(2, NUM_TOKENS, CHANNELS + 5, seed=1, device=device)
    inputs, weight = wide[:, :, :CHANNELS], draw(CHANNELS, WIDTH, seed=2, device=device)
    bias = draw(CHANNELS, seed=3, device=device) if has_bias else None
    caches = [torch.full((8, 2, 2, BLOCK_SIZE, 3), torch.nan, device=device) for _ in range(2)]
    tables, found, expected = torch.tensor(TABLE, dtype=torch.int32, device=device), list[Tensor](), list[Tensor]()
    for first in range(0, NUM_TOKENS + 1, chunk):
        at = [range(max(first - lag, 0), max(min(first + chunk, NUM_TOKENS + lag) - lag, 0)) for lag in (0, 1)]
        at = [range(one.start, min(one.stop, NUM_TOKENS)) for one in at]
        positions = torch.tensor([*at[0], *at[1]], device=device)
        starts = torch.tensor([0, len(at[0]), len(positions)], dtype=torch.int32, device=device)
        x = torch.cat([sequence[one.start : one.stop] for sequence, one in zip(inputs, at, strict=True)])
        slots, is_before = window_slots(tables, starts, positions, BLOCK_SIZE, WIDTH)
        store_inputs(caches[0], slots[:, -1], torch.nn.functional.pad(x, (0, 12 - CHANNELS)))
        read = read_inputs(caches[0], slots).masked_fill_(is_before[:, :, None], 0)[:, :, :CHANNELS]
        expected.append(convolve(read, weight, bias))
        out, sequences = torch.empty_like(x), sequences_of(starts, len(positions))
        tokens = ConvolvedTokens(sequences, starts, positions, slots[:, -1].contiguous(), tables)
        short_conv_triton(x, weight, bias, caches[1], tokens, out)
        found.append(out)
    return torch.cat(found), torch.cat(expected)


def check(device: str) -> None:
    for has_bias in (False, True):
        for chunk in CHUNKS:
            found, expected = run(chunk, device, has_bias=has_bias)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
