"""Dequantize packed 4-bit weights to bfloat16, for products with many rows by the library's kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe.weights import MIDDLE
from kernels.w4a16.weights import Offset, W4Weight

_BLOCK = 64
_FIRST_INTEGER = tl.constexpr(128.0)
_ZERO_POINT = tl.constexpr(int(Offset.ZERO_POINT))
_MINIMUM = tl.constexpr(int(Offset.MINIMUM))


@triton.jit
def dequantize_kernel(
    values, scales, output,
    NUM_ROWS: tl.constexpr, NUM_INPUTS: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_INPUTS: tl.constexpr, PARTS: tl.constexpr, OFFSET: tl.constexpr, IS_GATED: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Run program (block of rows, block of inputs)."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS))[None, :]
    tile, in_tile = row // TILE_ROWS, row % TILE_ROWS
    step, at = column // TILE_INPUTS, column % TILE_INPUTS
    place = (tile * (NUM_INPUTS // TILE_INPUTS) + step) * (TILE_ROWS * TILE_INPUTS // 8)
    word = place + ((in_tile // 16 * 8 + in_tile % 8) * 4 + at % 8 // 2) * (TILE_INPUTS // 16) + at // 16
    shift = in_tile % 16 // 8 * 4 + at % 16 // 8 * 8 + at % 2 * 16
    value = ((tl.load(values + word) >> shift) & 15).to(tl.float32)
    of_group = scales + (tile * (NUM_INPUTS // GROUP) + column // GROUP) * (PARTS * TILE_ROWS)
    pair = in_tile // 16 * 16 + in_tile % 8 * 2 + in_tile % 16 // 8
    scale = tl.load(of_group + pair).to(tl.float32)
    if OFFSET == _MINIMUM:
        exact = value * scale + tl.load(of_group + TILE_ROWS + pair).to(tl.float32)
    elif OFFSET == _ZERO_POINT:
        bits = tl.load(of_group + TILE_ROWS + pair)
        exact = (value - (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) - _FIRST_INTEGER)) * scale
    else:
        exact = (value - ZERO) * scale
    if IS_GATED:
        row = row // 16 * 8 + row % 8 + row % 16 // 8 * (NUM_ROWS // 2)
    tl.store(output + row.to(tl.int64) * NUM_INPUTS + column, exact.to(output.dtype.element_ty))


def dequantize(weight: W4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the weight, [N, K], rows as before packing, rounded once."""
    rows, inputs = weight.shape
    output = torch.empty(rows, inputs, dtype=dtype, device=weight.values.device)
    dequantize_kernel[(rows // _BLOCK, inputs // _BLOCK)](
        weight.values,
        weight.scales,
        output,
        NUM_ROWS=rows,
        NUM_INPUTS=inputs,
        GROUP=weight.group,
        TILE_ROWS=weight.tile_rows,
        TILE_INPUTS=weight.tile_inputs,
        PARTS=weight.scales.shape[2],
        OFFSET=int(weight.offset),
        IS_GATED=weight.is_gated,
        ZERO=MIDDLE,
        BLOCK_ROWS=_BLOCK,
        BLOCK_INPUTS=_BLOCK,
    )
    return output
