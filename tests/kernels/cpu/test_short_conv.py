"""The gated short convolution in C++ beside torch in float64: chunks, blocks in any order, a part of a head."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import cpu_library
from kernels.cpu.step import StepKernels

BLOCK_SIZE, HEADS, HEAD_DIM = 8, 2, 16
CHANNELS, WIDTH = 2 * HEADS * HEAD_DIM - 5, 3
LENGTHS = (29, 17)
TABLES = torch.tensor([[4, 2, 5, 1], [3, 7, 6, 0]], dtype=torch.int32)


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def convolved(
    rows: list[Tensor], weight: Tensor, bias: Tensor | None, chunk: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[Tensor]:
    """Return the outputs of two sequences that are computed in chunks; rows: factor, gate and value of each."""
    kernels = StepKernels(cpu_library(), HEAD_DIM, dtype, kv_dtype)
    pool = torch.full((8, 2, 2, HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan).to(kv_dtype)
    found: list[list[Tensor]] = [[], []]
    for first in range(0, max(LENGTHS), chunk):
        parts = [one[first : first + chunk] for one in rows]
        positions = torch.cat([torch.arange(first, first + len(part)) for part in parts])
        starts = torch.tensor([0, len(parts[0]), len(positions)], dtype=torch.int32)
        ends = torch.tensor([first + len(part) for part in parts], dtype=torch.int32)
        table_of = TABLES.repeat_interleave(starts.diff(), 0)
        blocks = table_of.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
        step = kernels.begin(pool, 1, TABLES, starts, ends, positions, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
        factor, gate, value = torch.cat(parts).chunk(3, dim=1)
        out = torch.full((len(positions), CHANNELS + 2), torch.nan, dtype=dtype)[:, :CHANNELS]
        kernels.short_conv(step, (factor, gate, value), weight, bias, pool[:, 1, 0], out)
        for own, part in zip(found, out.split([len(one) for one in parts]), strict=True):
            own.append(part)
    return [torch.cat(own) for own in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution_equals_float64_in_any_chunks(dtype: torch.dtype, kv_dtype: torch.dtype, has_bias: bool) -> None:
    rows = [draw(length, 3 * CHANNELS, seed=length).to(dtype) for length in LENGTHS]
    weight, bias = draw(CHANNELS, WIDTH, seed=1).to(dtype), draw(CHANNELS, seed=2).to(dtype) if has_bias else None
    whole = convolved(rows, weight, bias, max(LENGTHS), dtype, kv_dtype)
    for chunk in (1, 3, 8):
        assert all(map(torch.equal, convolved(rows, weight, bias, chunk, dtype, kv_dtype), whole))
    # Inputs, the sum and the product with the gate are rounded.
    is_exact = dtype == kv_dtype == torch.float32
    for one, found in zip(rows, whole, strict=True):
        factor, gate, value = one.double().chunk(3, dim=1)
        inputs = torch.nn.functional.pad((factor * value).T, (WIDTH - 1, 0))
        sums = (inputs.unfold(1, WIDTH, 1) * weight.double()[:, None]).sum(2).T
        expected = gate * (sums if bias is None else sums + bias.double())
        largest = expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=largest * (1e-6 if is_exact else 2**-7))
