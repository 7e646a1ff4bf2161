"""The linear layers of experts over sorted rows, for every device.

A program computes tiles of BLOCK_N outputs for a block of up to BLOCK_M sorted rows of one expert. Weights are the left
operand, as in list_product.py. Each output is one chain of float32 sums over K in order, so its bits depend neither on
T nor on other rows. fp8: sums of 128 inputs are scaled and added in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.activation import Activation, apply_gate, launch_options, num_halves, squared_relu
from kernels.moe.routing import BLOCK_FIELDS, Routing
from kernels.moe.weights import ExpertProduct, ScaledExperts
from kernels.scaled import GROUP, Scaled

PROGRAMS = 1024  # enough for each device; a program takes every 1024th tile


@dataclass(frozen=True)
class GroupedTiles:
    """How a product is cut.

    Attributes:
        block_n: Outputs per tile; gated: of gate and of up each.
        block_k: Inputs per step.
        num_warps: Warps per program.
        num_stages: Depth of the pipeline.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def store_sums(
    output, sums, sums_of_up, bias, first_output, sorted_rows, outputs, inside_m,
    NUM_OUTPUTS: tl.constexpr, GATED: tl.constexpr, SQUARED: tl.constexpr, IS_GELU: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the bias, activate, and store the sums [N, M] of an expert, whose bias begins at `first_output`."""
    inside_n = outputs < NUM_OUTPUTS
    dtype: tl.constexpr = output.dtype.element_ty
    if bias is not None:
        of_bias = bias + first_output + outputs
        sums += tl.load(of_bias, mask=inside_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            sums_of_up += tl.load(of_bias + NUM_OUTPUTS, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    result = sums.to(dtype)
    if GATED:
        up = sums_of_up.to(dtype).to(tl.float32)
        result = apply_gate(result.to(tl.float32), up, IS_GELU, ALPHA, LIMIT, UP_OFFSET).to(dtype)
    if SQUARED:
        result = squared_relu(result.to(tl.float32)).to(dtype)
    places = output + sorted_rows.to(tl.int64)[None, :] * NUM_OUTPUTS + outputs[:, None]
    tl.store(places, result, mask=inside_m[None, :] & inside_n[:, None])


@triton.jit
def of_block(blocks, block, FIELDS: tl.constexpr):
    """Return (expert, first sorted row, end of the expert's rows)."""
    place = blocks + block * FIELDS
    return tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _step(
    weight, rows, weight_scales, row_scales, sums, inside_n, inside_m, inside_k,
    ACCUMULATES: tl.constexpr,
):  # fmt: skip
    """Add the product of BLOCK_K inputs; fp8 products are scaled first."""
    left = tl.load(weight, mask=inside_n[:, None] & inside_k[None, :], other=0.0)
    right = tl.load(rows, mask=inside_m[None, :] & inside_k[:, None], other=0.0)
    if ACCUMULATES:
        return tl.dot(left, right, sums, input_precision="ieee")
    return sums + tl.dot(left, right) * (weight_scales[:, None] * row_scales[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def grouped_product_kernel(
    x, x_scales, weight, weight_scales, bias, pairs, blocks, num_blocks, output, num_rows,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, TOP_K: tl.constexpr, FIELDS: tl.constexpr,
    GATED: tl.constexpr, SQUARED: tl.constexpr, IS_GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, SCALED: tl.constexpr, SCALE_GROUPED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run every num_programs-th tile. TOP_K > 0: rows of x are tokens; 0: sorted rows."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N
    BOXES: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = NUM_OUTPUTS * BOXES
    GROUPS: tl.constexpr = NUM_INPUTS // 128
    for work in range(tl.program_id(0), tl.load(num_blocks) * TILES, tl.num_programs(0)):
        expert, first, end = of_block(blocks, work // TILES, FIELDS)
        sorted_rows = first + tl.arange(0, BLOCK_M)
        inside_m = sorted_rows < end
        rows = sorted_rows
        if TOP_K > 0:
            rows = tl.load(pairs + sorted_rows, mask=inside_m, other=0) // TOP_K
        outputs = work % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = outputs < NUM_OUTPUTS
        inputs = tl.arange(0, BLOCK_K)
        left = weight + (expert * ROWS + outputs)[:, None] * NUM_INPUTS + inputs[None, :]
        right = x + rows.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        sums_of_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        of_rows, of_outputs, of_up = rows.to(tl.float32), outputs.to(tl.float32), outputs.to(tl.float32)
        if SCALED and not SCALE_GROUPED:
            of_rows = tl.load(x_scales + rows, mask=inside_m, other=0.0)
            of_outputs = tl.load(weight_scales + expert * ROWS + outputs, mask=inside_n, other=0.0)
            if GATED:
                of_up = tl.load(weight_scales + expert * ROWS + NUM_OUTPUTS + outputs, mask=inside_n, other=0.0)
        for start in range(0, NUM_INPUTS, BLOCK_K):
            inside_k = start + inputs < NUM_INPUTS
            if SCALE_GROUPED:
                group = start // 128
                of_rows = tl.load(x_scales + group * num_rows + rows, mask=inside_m, other=0.0)
                place = weight_scales + (expert * (ROWS // 128) + outputs // 128) * GROUPS + group
                of_outputs = tl.load(place, mask=inside_n, other=0.0)
                if GATED:
                    of_up = tl.load(place + NUM_OUTPUTS // 128 * GROUPS, mask=inside_n, other=0.0)
            sums = _step(
                left + start, right + start, of_outputs, of_rows, sums, inside_n, inside_m, inside_k, not SCALED
            )
            if GATED:
                sums_of_up = _step(
                    left + NUM_OUTPUTS * NUM_INPUTS + start, right + start, of_up, of_rows, sums_of_up,
                    inside_n, inside_m, inside_k, not SCALED,
                )  # fmt: skip
        store_sums(
            output, sums, sums_of_up, bias, expert * ROWS, sorted_rows, outputs, inside_m,
            NUM_OUTPUTS, GATED, SQUARED, IS_GELU, ALPHA, LIMIT, UP_OFFSET,
        )  # fmt: skip


def grouped_product(
    x: Tensor | Scaled,
    product: ExpertProduct,
    routing: Routing,
    activation: Activation | None,
    tiles: GroupedTiles,
    dtype: torch.dtype,
) -> Tensor:
    """Compute one product of the owned experts.

    Args:
        x: Of the first product: rows [T, K]; of the second: sorted rows [T * k, K]. Scaled for fp8 weights.
        product: Weights of 16 or 32 bits, or fp8.
        routing: From route().
        activation: After the first product; with a gate, its weight has 2 * N rows. None: the second product.
        tiles: From tiles_of().
        dtype: Of the result.

    Returns:
        [T * k, N] in sorted order; rows of experts that are not owned are not written.
    """
    values = x.values if isinstance(x, Scaled) else x
    weight = product.weight
    is_scaled = isinstance(weight, ScaledExperts)
    weight_values = weight.values if isinstance(weight, ScaledExperts) else weight
    assert isinstance(weight_values, Tensor) and is_scaled == isinstance(x, Scaled)
    num_rows, num_inputs = values.shape
    num_outputs = product.num_outputs // num_halves(activation)
    assert weight_values.shape[2] == num_inputs and values.is_contiguous() and weight_values.is_contiguous()
    assert weight_values.dtype == values.dtype
    is_grouped = isinstance(weight, ScaledExperts) and weight.is_grouped
    if is_grouped:
        assert num_outputs % GROUP == 0 and num_inputs % GROUP == 0 and tiles.block_k == GROUP
    output = values.new_empty(routing.num_pairs, num_outputs, dtype=dtype)
    if num_rows == 0:
        return output
    num_tiles = len(routing.blocks) * triton.cdiv(num_outputs, tiles.block_n)
    grouped_product_kernel[(min(num_tiles, PROGRAMS),)](
        values,
        x.scales if isinstance(x, Scaled) else None,
        weight_values,
        weight.scales if isinstance(weight, ScaledExperts) else None,
        product.bias,
        routing.pairs,
        routing.blocks,
        routing.num_blocks,
        output,
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TOP_K=0 if activation is None else routing.ids.shape[1],
        FIELDS=BLOCK_FIELDS,
        SCALED=is_scaled,
        SCALE_GROUPED=is_grouped,
        BLOCK_M=max(routing.block_rows, 16),  # a dot has no fewer columns
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(activation),
        **dependent_launch(values),
    )
    return output


def tiles_of(is_gated: bool, block_rows: int, element_size: int) -> GroupedTiles:
    """Return the fastest tiles measured for 128 experts of 768 x 2,048 on an H100 at 1 to 2,048 tokens."""
    if element_size == 4:
        return GroupedTiles(32, 32, num_stages=2)
    if block_rows > 64:
        return GroupedTiles(128, 64, num_warps=8, num_stages=4 if is_gated else 3)
    return GroupedTiles(64, 64, num_stages=5 if block_rows <= 32 else 4)


def scaled_tiles_of(is_gated: bool, weight: ScaledExperts, routing: Routing) -> GroupedTiles:
    """Return the fastest tiles measured in fp8 on an H200 at 1 to 256 tokens.

    With scales per row, for 256 experts of 512 x 2,048; with scales of blocks, for 128 of 768 x 2,048. More than 64
    rows were measured on an H100, as above.
    """
    block_rows = routing.block_rows
    if block_rows > 64:
        return GroupedTiles(128, GROUP, num_warps=8) if is_gated else GroupedTiles(64, GROUP)
    if weight.is_grouped:
        if is_gated:
            return GroupedTiles(64, GROUP, num_stages=4 if block_rows <= 8 else 3)
        return GroupedTiles(128 if len(routing.blocks) >= 64 else 64, GROUP)
    return GroupedTiles(64, GROUP, num_stages=3 if is_gated and block_rows > 16 else 5)
