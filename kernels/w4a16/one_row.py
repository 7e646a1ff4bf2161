"""Linear layers with one row and a 4-bit weight on Hopper GPUs, at the speed of reading the weight.

A program has whole tiles of 16 or 32 outputs. Its four warps share the inputs of a tile, and add their sums in shared
memory. In few_rows.py programs share a tile, so that rows of x are read less often, but adding their sums takes 3 us.
Integers are exact, the sums of a group of inputs are scaled in float32, and all sums are added in a fixed order.
"""
# One warp loads. Weights do not depend on the previous kernel: the ring is requested before the dependency wait.

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.skinny_linear import NUM_SMS
from kernels.w4a16.outputs import gated, with_bias
from kernels.w4a16.unpack import MINIMUM, NONE, unpacked_words
from kernels.w4a16.weights import W4Weight

_WARPS = 4
_TILES_WORTH_32_ROWS = 4  # per program: 18 us instead of 20 for 28,672 outputs; fewer divide unevenly
_STAGE_INPUTS = 2048  # at most: with half of them 22 us instead of 20
_COLUMNS = gl.constexpr(8)  # of a product; one is stored
_ROW_COLUMNS = gl.constexpr(256)  # of a TMA box
_ZERO = gl.constexpr(136.0)  # zero points are stored as 128 + zero point, and integers are 8 less
_SHARED_BYTES = 225 * 1024  # of an SM, less barriers
_LEAST_STAGES = 3  # of which two are full while one is read
_MOST_INPUTS = 32_768  # half of an SM's memory has the row and the ring
_PROGRAMS_PER_SM = 2  # so that the next kernel starts while this one ends


@gluon.constexpr_function
def _bases(size, dim, rank):
    """Return the bases of the bits of a dimension."""
    return [[0] * dim + [1 << bit] + [0] * (rank - dim - 1) for bit in range(size.bit_length() - 1)]


@gluon.constexpr_function
def _layout_of_words(warps, chunks, blocks, steps):
    """Return the layout of [warp, chunk, row / 16, lane / 4, lane % 4, step]."""
    return gl.DistributedLinearLayout(
        reg_bases=_bases(steps, 5, 6) + _bases(chunks, 1, 6) + _bases(blocks, 2, 6),
        lane_bases=_bases(4, 4, 6) + _bases(8, 3, 6),
        warp_bases=_bases(warps, 0, 6),
        block_bases=[],
        shape=[warps, chunks, blocks, 8, 4, steps],
    )


@gluon.constexpr_function
def _layout_of_numbers(warps, blocks):
    """Return the layout of [warp, 1, row / 16, lane / 4, lower] that agrees with that of sums."""
    return gl.DistributedLinearLayout(
        reg_bases=_bases(2, 4, 5) + _bases(blocks, 2, 5),
        lane_bases=[[0] * 5, [0] * 5, *_bases(8, 3, 5)],
        warp_bases=_bases(warps, 0, 5),
        block_bases=[],
        shape=[warps, 1, blocks, 8, 2],
    )


@gluon.constexpr_function
def _layout_of_joined(warps, rows):
    """Return the layout of [warp, row, column] where a thread has all warps, and a gate beside its up."""
    bits = _bases(rows, 1, 3)
    others = [*bits[:3], *bits[4:]]
    return gl.DistributedLinearLayout(
        reg_bases=[*_bases(warps, 0, 3), bits[3]],
        lane_bases=_bases(8, 2, 3) + others[:2],
        warp_bases=[*others[2:], [0, 0, 0]][: warps.bit_length() - 1],
        block_bases=[],
        shape=[warps, rows, 8],
    )


@gluon.jit
def _request(
    weight, numbers, ring, number_ring, full, unit, first_tile, stage, steps, wanted,
    BYTES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    tile = first_tile + unit // steps
    place = tile // TILES * steps + unit % steps  # of TILES tiles that are stored together
    words: gl.constexpr = ring.shape[2]
    pairs: gl.constexpr = number_ring.shape[2]
    barrier = full.index(stage)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    at_words = [place * ring.shape[1], tile % TILES * words]
    at_pairs = [place * number_ring.shape[1], tile % TILES * pairs]
    tma.async_copy_global_to_shared(weight, at_words, barrier, ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(numbers, at_pairs, barrier, number_ring.index(stage), pred=wanted)


@gluon.jit
def _produce(
    weight, numbers, x, ring, number_ring, row, full, empty, row_full, first_tile, num_units, steps,
    BYTES: gl.constexpr, TILES: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The first weights are requested before the dependency wait, the row after it."""
    for early in gl.static_range(NUM_STAGES):
        wanted = early < num_units
        _request(weight, numbers, ring, number_ring, full, early, first_tile, early, steps, wanted, BYTES, TILES)
    gdc_wait()
    mbarrier.expect(row_full, row.shape[0] * row.shape[1] * 2)
    tma.async_copy_global_to_shared(x, [0, 0], row_full, row)
    for unit in range(NUM_STAGES, num_units):
        stage = unit % NUM_STAGES
        mbarrier.wait(empty.index(stage), (unit // NUM_STAGES & 1) ^ 1)
        _request(weight, numbers, ring, number_ring, full, unit, first_tile, stage, steps, True, BYTES, TILES)


@gluon.jit
def _unpacked(words, operand: gl.constexpr):
    """Return integers less 8, bfloat16 [warp, 16 * blocks, inputs], from words [warp, chunk, block, 8, 4, step]."""
    WARPS: gl.constexpr = words.shape[0]
    CHUNKS: gl.constexpr = words.shape[1]
    BLOCKS: gl.constexpr = words.shape[2]
    STEPS: gl.constexpr = words.shape[5]
    # warp, chunk, block, lane / 4, lane % 4, pair of steps, half, lower, right, step
    values = gl.reshape(
        unpacked_words(words, None, None, NONE, False), [WARPS, CHUNKS, BLOCKS, 8, 4, STEPS // 2, 2, 2, 2, 2]
    )
    tile = gl.permute(values, [0, 2, 7, 3, 1, 5, 9, 8, 4, 6])
    return gl.convert_layout(gl.reshape(tile, [WARPS, BLOCKS * 16, CHUNKS * STEPS * 16]), operand, assert_trivial=True)


@gluon.jit
def _numbers_of(stored, part: gl.constexpr, TYPE: gl.constexpr, of_rows: gl.constexpr):
    """Return float32 numbers [warp, rows] from 16-bit ones [warp, part, row / 16, lane / 4, lower]."""
    WARPS: gl.constexpr = stored.shape[0]
    BLOCKS: gl.constexpr = stored.shape[2]
    numbers = stored.slice(part, 1, dim=1).load(_layout_of_numbers(WARPS, BLOCKS))
    numbers = gl.reshape(gl.permute(numbers, [0, 1, 2, 4, 3]), [WARPS, 16 * BLOCKS])
    return gl.convert_layout(numbers, of_rows, assert_trivial=True).to(TYPE, bitcast=True).to(gl.float32)


@gluon.jit
def _sums_of_group(
    words, stored, inputs, sums: gl.constexpr, OFFSET: gl.constexpr, SCALE_TYPE: gl.constexpr,
):  # fmt: skip
    """Return the scaled sums [warp, rows, 8] of a group of inputs [warp, inputs] per warp."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    of_rows: gl.constexpr = gl.SliceLayout(2, sums)
    WARPS: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = 16 * words.shape[2]
    INPUTS: gl.constexpr = inputs.shape[1]
    column = gl.expand_dims(inputs.load(gl.SliceLayout(2, right)), 2)
    columns, _ = gl.broadcast(column, gl.zeros([WARPS, INPUTS, _COLUMNS], inputs.dtype, right))
    zeros = gl.zeros([WARPS, ROWS, _COLUMNS], gl.float32, sums)
    scales = _numbers_of(stored, 0, SCALE_TYPE, of_rows)
    total = mma_v2(_unpacked(words, left), columns, zeros) * scales[:, :, None]
    if OFFSET != NONE:
        of_inputs = mma_v2(gl.full([WARPS, ROWS, INPUTS], 1.0, inputs.dtype, left), columns, zeros)
        if OFFSET == MINIMUM:
            offsets = _numbers_of(stored, 1, SCALE_TYPE, of_rows) + 8.0 * scales
        else:
            offsets = (_ZERO - _numbers_of(stored, 1, gl.bfloat16, of_rows)) * scales
        total += of_inputs * offsets[:, :, None]
    return total


@gluon.jit
def _consume(
    tiles, tile_numbers, inputs, joined, full, empty, row_full, bias, output, first_tile, end_tile, num_outputs, steps,
    GATED: gl.constexpr, IS_GELU: gl.constexpr, OFFSET: gl.constexpr, GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr,
    SCALE_TYPE: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of a program. `GROUPS`: per warp and stage."""
    WARPS: gl.constexpr = tiles.shape[1]
    ROWS: gl.constexpr = 16 * tiles.shape[3]
    of_words: gl.constexpr = _layout_of_words(WARPS, tiles.shape[2], tiles.shape[3], tiles.shape[6])
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    gdc_wait()  # before the first store: the memory may still be read by the previous kernel
    mbarrier.wait(row_full, 0)
    unit = 0
    for tile in range(first_tile, end_tile):
        total = gl.zeros([WARPS, ROWS, _COLUMNS], gl.float32, sums)
        for step in range(steps):
            stage = unit % NUM_STAGES
            mbarrier.wait(full.index(stage), unit // NUM_STAGES & 1)
            for group in gl.static_range(GROUPS):
                words, stored = tiles.index(stage * GROUPS + group), tile_numbers.index(stage * GROUPS + group)
                of_group = inputs.index(step * GROUPS + group)
                total += _sums_of_group(words.load(of_words), stored, of_group, sums, OFFSET, SCALE_TYPE)
            gl.thread_barrier()  # all warps have read the stage
            mbarrier.arrive(empty.index(stage), count=1)
            unit += 1
        joined.store(total)
        of_warps = joined.load(_layout_of_joined(WARPS, ROWS))
        _store(gl.sum(of_warps, 0), bias, output, tile, num_outputs, GATED, IS_GELU)


@gluon.jit
def _store(total, bias, output, tile, num_outputs, GATED: gl.constexpr, IS_GELU: gl.constexpr):
    """Store the first column of [rows, 8]. Eight rows of gates are before eight of ups."""
    dtype: gl.constexpr = output.dtype.element_ty
    if bias is not None:
        total = with_bias(total, bias, tile, num_outputs, GATED)
    result = gated(total, dtype, IS_GELU) if GATED else total
    layout: gl.constexpr = result.type.layout
    outputs = tile * result.shape[0] + gl.arange(0, result.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout))[None, :]
    gl.store(output + outputs + column, result.to(dtype), mask=column == 0)


# Shapes must not trigger a compilation: a start would compile one kernel per layer.
@gluon.jit(do_not_specialize=["num_tiles", "steps"])
def w4_one_row_kernel(
    weight, numbers, x, bias, output, num_outputs, num_tiles, steps, GATED: gl.constexpr, IS_GELU: gl.constexpr,
    OFFSET: gl.constexpr, BLOCKS: gl.constexpr, WORD_STEPS: gl.constexpr, GROUP_CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, NUM_STAGES: gl.constexpr, SCALE_TYPE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Run program (share of the tiles)."""
    gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if OFFSET == NONE else 2
    INPUTS: gl.constexpr = 16 * WORD_STEPS * GROUP_CHUNKS
    ROW: gl.constexpr = x.block_shape[0] * x.block_shape[1]
    CHUNKS: gl.constexpr = num_warps * GROUPS * GROUP_CHUNKS
    WORDS: gl.constexpr = 32 * BLOCKS * WORD_STEPS
    BYTES: gl.constexpr = 4 * (CHUNKS * WORDS + num_warps * GROUPS * PARTS * 8 * BLOCKS)
    ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, CHUNKS, WORDS], weight.layout)
    number_ring = gl.allocate_shared_memory(
        gl.int32, [NUM_STAGES, num_warps * GROUPS * PARTS, 8 * BLOCKS], numbers.layout
    )
    row = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    joined = gl.allocate_shared_memory(
        gl.float32, [num_warps, 16 * BLOCKS, _COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    plain6: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
    plain5: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NUM_GROUPS: gl.constexpr = NUM_STAGES * GROUPS
    tiles = ring._reinterpret(gl.int32, [NUM_GROUPS, num_warps, GROUP_CHUNKS, BLOCKS, 8, 4, WORD_STEPS], plain6)
    tile_numbers = number_ring._reinterpret(gl.int16, [NUM_GROUPS, num_warps, PARTS, BLOCKS, 8, 2], plain5)
    inputs = row._reinterpret(x.dtype, [ROW // (num_warps * INPUTS), num_warps, INPUTS], plain2)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    row_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(row_full, count=1)
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(early), count=1)
        mbarrier.init(empty.index(early), count=1)
    share, shares = gl.program_id(0), gl.num_programs(0)
    first_tile, end_tile = share * num_tiles // shares, (share + 1) * num_tiles // shares
    gl.warp_specialize(
        [
            (_consume, (
                tiles, tile_numbers, inputs, joined, full, empty, row_full, bias, output, first_tile, end_tile,
                num_outputs, steps, GATED, IS_GELU, OFFSET, GROUPS, NUM_STAGES, SCALE_TYPE,
            )),
            (_produce, (
                weight, numbers, x, ring, number_ring, row, full, empty, row_full, first_tile,
                (end_tile - first_tile) * steps, steps, BYTES, TILES, NUM_STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def serves_one_row(weight: W4Weight) -> bool:
    """Return whether w4_one_row() knows the weight's number of inputs; few_rows.py knows all."""
    _, inputs = weight.shape
    return inputs % (_WARPS * weight.group) == 0 == inputs % _ROW_COLUMNS.value and inputs <= _MOST_INPUTS


def w4_one_row(x: Tensor, weight: W4Weight, bias: Tensor | None = None, is_gelu: bool = False) -> Tensor:
    """Return x @ weight.T + bias, or activation(gate) * up of a gated weight.

    Args:
        x: [1, K], bfloat16, contiguous.
        weight: [N, K], see serves_one_row().
        bias: [N], added to the float32 sums; None: 0.
        is_gelu: The activation is gelu_tanh, otherwise silu.

    Returns:
        [1, N], or [1, N / 2] of a gated weight, bfloat16. Gate and up are rounded before they are multiplied.
    """
    num_weights, num_inputs = weight.shape
    assert x.shape == (1, num_inputs) and x.dtype == torch.bfloat16 and x.is_contiguous() and serves_one_row(weight)
    output = x.new_empty(1, num_weights // 2 if weight.is_gated else num_weights)
    blocks = 2 if num_weights >= 32 * NUM_SMS * _TILES_WORTH_32_ROWS else 1
    row = x.view(-1, _ROW_COLUMNS.value)
    box_of_row = [triton.next_power_of_2(len(row)), _ROW_COLUMNS.value]
    free_bytes = _SHARED_BYTES // _PROGRAMS_PER_SM - box_of_row[0] * box_of_row[1] * 2 - blocks * _WARPS * 512 - 1024
    group_chunks, parts = weight.group // weight.tile_inputs, weight.scales.shape[2]
    words = blocks * 2 * weight.tile_inputs
    group_bytes = _WARPS * 4 * (group_chunks * words + parts * blocks * 8)
    groups = _groups_per_stage(weight, free_bytes // group_bytes)
    w4_one_row_kernel[(NUM_SMS,)](
        _boxes(weight.values.view(-1, weight.values.shape[2]), [groups * _WARPS * group_chunks, words]),
        _boxes(weight.scales.view(torch.int32).view(-1, weight.tile_rows // 2), [groups * _WARPS * parts, 8 * blocks]),
        _boxes(row, box_of_row),
        bias,
        output,
        output.shape[1],
        num_weights // (16 * blocks),
        num_inputs // (_WARPS * weight.group * groups),
        GATED=weight.is_gated,
        IS_GELU=is_gelu,
        OFFSET=int(weight.offset),
        BLOCKS=blocks,
        WORD_STEPS=weight.tile_inputs // 16,
        GROUP_CHUNKS=group_chunks,
        GROUPS=groups,
        TILES=weight.tile_rows // 16 // blocks,
        NUM_STAGES=free_bytes // (groups * group_bytes),
        SCALE_TYPE=gl.float16 if weight.scales.dtype == torch.float16 else gl.bfloat16,
        num_warps=_WARPS,
        maxnreg=128,  # of 65,536 per SM: two programs, each with four warps and the four of the loading one
        launch_pdl=True,
    )
    return output


def _groups_per_stage(weight: W4Weight, most_in_ring: int) -> int:
    """Return the groups of a warp in a stage, if the ring has room for a number of them."""
    _, num_inputs = weight.shape
    inputs = _WARPS * weight.group
    most = min(_STAGE_INPUTS // inputs, most_in_ring // _LEAST_STAGES)
    return next(count for count in (16, 8, 4, 2, 1) if count <= max(most, 1) and num_inputs % (inputs * count) == 0)


def _boxes(stored: Tensor, box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * stored.itemsize, rank=2)
    return TensorDescriptor.from_tensor(stored, box, layout)
