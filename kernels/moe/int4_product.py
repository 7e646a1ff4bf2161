"""The linear layers of experts with 4-bit integer weights, for every device.

Tiles and work list are those of grouped_product.py. A step is one group of inputs: its weights are dequantized in
registers to the type of x, rounded once. Each output is one chain of float32 sums over K in order, so its bits depend
neither on T nor on other rows.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.moe.activation import Activation, launch_options, num_halves
from kernels.moe.grouped_product import PROGRAMS, GroupedTiles, of_block, store_sums
from kernels.moe.routing import BLOCK_FIELDS, Routing
from kernels.moe.weights import MIDDLE, ExpertProduct, Int4Experts

# Four bytes become eight bfloat16. From 128 on, the lowest bits of a bfloat16 are an integer. sm_80 has no sums and
# products of bfloat16 except fma. $0, $1: of the low bits; $2, $3: of the high ones; $4: bytes; $5, $6: scales; $7, $8:
# zero points plus 128, negative.
_UNPACK = tl.constexpr("""{
    .reg .b32 left, right, bits, one, nothing;
    mov.b32 one, 0x3F803F80;
    mov.b32 nothing, 0x80008000;
    prmt.b32 left, $4, 0, 0x4140;
    prmt.b32 right, $4, 0, 0x4342;
    lop3.b32 bits, left, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 bits, bits, one, $7;
    fma.rn.bf16x2 $0, bits, $5, nothing;
    lop3.b32 bits, right, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 bits, bits, one, $8;
    fma.rn.bf16x2 $1, bits, $6, nothing;
    shr.b32 left, left, 4;
    lop3.b32 bits, left, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 bits, bits, one, $7;
    fma.rn.bf16x2 $2, bits, $5, nothing;
    shr.b32 right, right, 4;
    lop3.b32 bits, right, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 bits, bits, one, $8;
    fma.rn.bf16x2 $3, bits, $6, nothing;
}""")


@triton.jit
def _scales_of(scales, zeros, group, inside, ROWS: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """Return scales and zero points [N] of a group, in DTYPE."""
    scale = tl.load(scales + group * ROWS, mask=inside, other=0.0)
    zero = tl.full(scale.shape, MIDDLE, tl.int32)
    if zeros is not None:
        zero = tl.load(zeros + group * ROWS, mask=inside, other=MIDDLE).to(tl.int32)
    return scale.to(DTYPE), zero


@triton.jit
def _dequantized(packed, scale, zero, DTYPE: tl.constexpr):
    """Return the weights of the low bits and those of the high bits, each [N, K] in DTYPE and rounded once."""
    if tl.bfloat16 == DTYPE:
        scales = tl.broadcast_to(scale[:, None], packed.shape)
        zeros = tl.broadcast_to((-128 - zero).to(tl.bfloat16)[:, None], packed.shape)
        return tl.inline_asm_elementwise(
            _UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, scales, zeros],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    low, high = (packed & 15).to(tl.int32), (packed >> 4).to(tl.int32)
    return (low - zero[:, None]).to(DTYPE) * scale[:, None], (high - zero[:, None]).to(DTYPE) * scale[:, None]


@triton.jit
def _add_group(sums, packed, scale, zero, low_rows, high_rows):
    """Add the products [N, M] of one group, whose packed weights have half of the inputs in their low bits."""
    low, high = _dequantized(packed, scale, zero, low_rows.dtype)
    sums = tl.dot(low, low_rows, sums, input_precision="ieee")
    return tl.dot(high, high_rows, sums, input_precision="ieee")


@triton.jit
def int4_product_kernel(
    x, weight, scales, zeros, bias, pairs, blocks, num_blocks, output,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, TOP_K: tl.constexpr, FIELDS: tl.constexpr,
    GATED: tl.constexpr, SQUARED: tl.constexpr, IS_GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, MIDDLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run every num_programs-th tile. TOP_K > 0: rows of x are tokens; 0: sorted rows."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = NUM_OUTPUTS * 2 if GATED else NUM_OUTPUTS
    GROUPS: tl.constexpr = NUM_INPUTS // (2 * HALF)
    for work in range(tl.program_id(0), tl.load(num_blocks) * TILES, tl.num_programs(0)):
        expert, first, end = of_block(blocks, work // TILES, FIELDS)
        sorted_rows = first + tl.arange(0, BLOCK_M)
        inside_m = sorted_rows < end
        rows = sorted_rows
        if TOP_K > 0:
            rows = tl.load(pairs + sorted_rows, mask=inside_m, other=0) // TOP_K
        outputs = work % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = outputs < NUM_OUTPUTS
        columns = tl.arange(0, HALF)
        left = weight + (expert * ROWS + outputs)[:, None] * (GROUPS * HALF) + columns[None, :]
        right = x + rows.to(tl.int64)[None, :] * NUM_INPUTS + columns[:, None]
        of_scales = scales + expert * GROUPS * ROWS + outputs
        of_zeros, up_zeros = zeros, zeros
        if zeros is not None:
            of_zeros = zeros + expert * GROUPS * ROWS + outputs
            up_zeros = of_zeros + NUM_OUTPUTS
        dtype: tl.constexpr = x.dtype.element_ty
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        sums_of_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        # Scales are loaded one step ahead: the compiler's pipeline has the operands of products only.
        scale, zero = _scales_of(of_scales, of_zeros, 0, inside_n, ROWS, MIDDLE, dtype)
        up_scale, up_zero = scale, zero
        if GATED:
            up_scale, up_zero = _scales_of(of_scales + NUM_OUTPUTS, up_zeros, 0, inside_n, ROWS, MIDDLE, dtype)
        for group in range(GROUPS):
            has_next = inside_n & (group + 1 < GROUPS)
            next_scale, next_zero = _scales_of(of_scales, of_zeros, group + 1, has_next, ROWS, MIDDLE, dtype)
            low_rows = tl.load(right + group * 2 * HALF, mask=inside_m[None, :], other=0.0)
            high_rows = tl.load(right + group * 2 * HALF + HALF, mask=inside_m[None, :], other=0.0)
            packed = tl.load(left + group * HALF, mask=inside_n[:, None], other=0)
            sums = _add_group(sums, packed, scale, zero, low_rows, high_rows)
            scale, zero = next_scale, next_zero
            if GATED:
                next_scale, next_zero = _scales_of(
                    of_scales + NUM_OUTPUTS, up_zeros, group + 1, has_next, ROWS, MIDDLE, dtype
                )
                packed = tl.load(left + NUM_OUTPUTS * GROUPS * HALF + group * HALF, mask=inside_n[:, None], other=0)
                sums_of_up = _add_group(sums_of_up, packed, up_scale, up_zero, low_rows, high_rows)
                up_scale, up_zero = next_scale, next_zero
        store_sums(
            output, sums, sums_of_up, bias, expert * ROWS, sorted_rows, outputs, inside_m,
            NUM_OUTPUTS, GATED, SQUARED, IS_GELU, ALPHA, LIMIT, UP_OFFSET,
        )  # fmt: skip


def int4_product(
    x: Tensor, product: ExpertProduct, routing: Routing, activation: Activation | None, tiles: GroupedTiles
) -> Tensor:
    """Compute one product of the owned experts.

    Args:
        x: Of the first product: rows [T, K]; of the second: sorted rows [T * k, K].
        product: Weights of Int4Experts.
        routing: From route().
        activation: After the first product; with a gate, its weight has 2 * N rows. None: the second product.
        tiles: From int4_tiles_of().

    Returns:
        [T * k, N] in sorted order, dtype of x; rows of experts that are not owned are not written.
    """
    weight = product.weight
    assert isinstance(weight, Int4Experts) and weight.values.is_contiguous() and x.is_contiguous()
    num_inputs, num_outputs = x.shape[1], product.num_outputs // num_halves(activation)
    assert weight.values.shape[2] * weight.group == num_inputs
    output = x.new_empty(routing.num_pairs, num_outputs)
    if len(x) == 0:
        return output
    num_tiles = len(routing.blocks) * triton.cdiv(num_outputs, tiles.block_n)
    int4_product_kernel[(min(num_tiles, PROGRAMS),)](
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        product.bias,
        routing.pairs,
        routing.blocks,
        routing.num_blocks,
        output,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TOP_K=0 if activation is None else routing.ids.shape[1],
        FIELDS=BLOCK_FIELDS,
        MIDDLE=MIDDLE,
        BLOCK_M=max(routing.block_rows, 16),  # a dot has no fewer columns
        BLOCK_N=tiles.block_n,
        HALF=weight.group // 2,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(activation),
        **dependent_launch(x),
    )
    return output


def int4_tiles_of(is_gated: bool, block_rows: int, group: int, element_size: int) -> GroupedTiles:
    """Return the fastest tiles measured for 128 experts of 768 x 2,048 on an H200 at 1 to 2,048 tokens.

    All have four warps or more, and so the same instruction: with two, sums are rounded in another order.
    """
    if element_size == 4:
        return GroupedTiles(32, group, num_stages=2)
    if is_gated:
        return GroupedTiles(64, group) if block_rows <= 64 else GroupedTiles(128, group, num_warps=8)
    return GroupedTiles(128, group)
