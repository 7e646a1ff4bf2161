"""Linear layers with up to 768 rows and a 4-bit weight on Hopper GPUs, at the speed of reading the weight.

The work is all (tile of rows of the weight, step of inputs) in order; each program, one per SM, has an even share of
it, through one TMA-filled ring. Integers become bfloat16 in registers, the left operand of a product. Up to 32 rows,
or 16 if there are minima, they are exact, and the sums of a group of inputs are scaled in float32. Minima are
multiplied with the sums of the group's inputs, which are products with ones. With more rows, scaled integers plus
minima are rounded. Sums are added in the order of K. Programs that share a tile store their sums, and the last to
finish adds them in the order of K, so the bits depend neither on other rows nor on the order of arrival.
"""
# One warp loads, so that the others never wait for each other at a copy. Weights do not depend on the previous kernel:
# the ring is requested before the dependency wait.

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.skinny_linear import NUM_SMS
from kernels.w4a16.outputs import gated, with_bias
from kernels.w4a16.unpack import MINIMUM, NONE, layout_of_words, load_part, scales_of, unpacked
from kernels.w4a16.weights import Offset, W4Weight

MAX_ROWS = 768  # with more, dequantizing and the library's product take less time
_EXACT_ROWS = 32
_EXACT_ROWS_WITH_MINIMA = 16  # 32 rows take 110 us with scaled sums and 105 us with scaled values (H200)
_MOST_SCALED_SUMS = gl.constexpr(_EXACT_ROWS)
_MAX_BLOCK_M = 128  # rows of a program
_SHARED_BYTES = 225 * 1024  # of an SM, less barriers
_REGISTERS = 65_536  # of an SM; the hardware reserves four warps for the loading one
_MAX_TILES = 4096
_WORD_COLUMNS = 256  # of a TMA box


@dataclass(frozen=True)
class W4Tiles:
    """How a linear layer is cut.

    Attributes:
        block_m: Rows of x of a program; with at most 32, sums are scaled, otherwise values, which rounds them.
        step_inputs: Inputs per step, at most.
        programs_per_sm: Programs for which an SM has room. With 2, the next kernel starts while this one ends.
        shares: Programs per row block.
        num_warps: Warps that multiply; one more loads.
    """

    block_m: int
    step_inputs: int
    programs_per_sm: int
    shares: int
    num_warps: int = 8


@gluon.jit
def _request_weights(
    weight, scales, ring, scale_ring, full, unit, stage, wanted,
    BYTES: gl.constexpr, VALUE_ROWS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Request the weights of a unit. Its barrier also expects the rows of x, requested by _request_rows."""
    barrier = full.index(stage)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(weight, [unit * VALUE_ROWS, 0], barrier, ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(scales, [unit * GROUPS, 0], barrier, scale_ring.index(stage), pred=wanted)


@gluon.jit
def _request_rows(
    x, rows, full, unit, stage, wanted, first_row, steps, INPUTS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    for chunk in gl.static_range(CHUNKS):
        place = [first_row, (unit % steps * CHUNKS + chunk) * INPUTS]
        tma.async_copy_global_to_shared(x, place, full.index(stage), rows.index(stage * CHUNKS + chunk), pred=wanted)


@gluon.jit
def _produce(
    weight, scales, x, ring, scale_ring, rows, full, empty, first_unit, num_units, first_row, steps,
    BYTES: gl.constexpr, VALUE_ROWS: gl.constexpr, GROUPS: gl.constexpr, INPUTS: gl.constexpr, CHUNKS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The first weights are requested before the dependency wait, the rows after it."""
    for early in gl.static_range(NUM_STAGES):
        _request_weights(
            weight, scales, ring, scale_ring, full, first_unit + early, early, early < num_units,
            BYTES, VALUE_ROWS, GROUPS,
        )  # fmt: skip
    gdc_wait()
    for early in gl.static_range(NUM_STAGES):
        unit, wanted = first_unit + early, early < num_units
        _request_rows(x, rows, full, unit, early, wanted, first_row, steps, INPUTS, CHUNKS)
    for step in range(NUM_STAGES, num_units):
        stage, unit = step % NUM_STAGES, first_unit + step
        mbarrier.wait(empty.index(stage), (step // NUM_STAGES & 1) ^ 1)
        _request_weights(weight, scales, ring, scale_ring, full, unit, stage, True, BYTES, VALUE_ROWS, GROUPS)
        _request_rows(x, rows, full, unit, stage, True, first_row, steps, INPUTS, CHUNKS)


@gluon.jit
def _multiply_values(
    tiles, tile_pairs, rows, empty, stage, last_stage, total, previous, words: gl.constexpr, operand: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, OFFSET: gl.constexpr, SCALE_TYPE: gl.constexpr,
):  # fmt: skip
    """Add the products of scaled values. A tile is unpacked while the last one is multiplied, also that of last_stage.

    `previous`, the last tile, is still being multiplied in the end.
    """
    PER_GROUP: gl.constexpr = CHUNKS // GROUPS
    for chunk in gl.static_range(CHUNKS):
        values, offsets, scales = load_part(
            tiles, tile_pairs, stage * CHUNKS + chunk, stage * GROUPS + chunk // PER_GROUP, words,
            OFFSET, True, SCALE_TYPE,
        )  # fmt: skip
        left = unpacked(values, offsets, scales, operand, OFFSET, True)
        columns = rows.index(stage * CHUNKS + chunk).permute((1, 0))
        total = warpgroup_mma(left, columns, total, is_async=True)
        total, previous = warpgroup_mma_wait(1, deps=(total, previous))
        if chunk == 0:
            gl.thread_barrier()  # all warps are done with the last stage
            mbarrier.arrive(empty.index(gl.maximum(last_stage, 0)), count=1, pred=last_stage >= 0)
        previous = left
    if CHUNKS % 2 == 1:
        # The loop around this call carries `previous` in fixed registers. After an odd number of tiles the compiler
        # copies it there, and then reuses registers that the product in flight still reads.
        total, previous = warpgroup_mma_wait(0, deps=(total, previous))
    return total, previous


@gluon.jit
def _multiply_integers(
    tiles, tile_pairs, tile_scales, rows, stage, total, words: gl.constexpr, CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr, OFFSET: gl.constexpr, SCALE_TYPE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Add the products of a unit: sums of integers, scaled, and the sums of each group's inputs times its minima."""
    PER_GROUP: gl.constexpr = CHUNKS // GROUPS
    PARTS: gl.constexpr = 1 if OFFSET == NONE else 2
    sums: gl.constexpr = total.type.layout
    for group in gl.static_range(GROUPS):
        product = gl.zeros(total.shape, gl.float32, sums)
        of_inputs = product
        for chunk in gl.static_range(PER_GROUP):
            place = stage * CHUNKS + group * PER_GROUP + chunk
            values, offsets, scales = load_part(
                tiles, tile_pairs, place, stage * GROUPS + group, words, OFFSET, False, SCALE_TYPE
            )
            left = unpacked(values, offsets, scales, gl.DotOperandLayout(0, sums, 2), OFFSET, False)
            columns = rows.index(place).permute((1, 0)).load(gl.DotOperandLayout(1, sums, 2))
            product = mma_v2(left, columns, product)
            if OFFSET == MINIMUM:
                of_inputs = mma_v2(gl.full_like(left, 1.0), columns, of_inputs)
        of_group = tile_scales.index((stage * GROUPS + group) * PARTS)
        total += product * scales_of(of_group, gl.SliceLayout(1, sums), SCALE_TYPE, num_warps)[:, None]
        if OFFSET == MINIMUM:
            minima = tile_scales.index((stage * GROUPS + group) * PARTS + 1)
            total += of_inputs * scales_of(minima, gl.SliceLayout(1, sums), SCALE_TYPE, num_warps)[:, None]
    return total


@gluon.jit
def _places_of(sums):
    """Return where a program keeps the elements of its sums, so that those of the lanes of a warp are neighbors."""
    row = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))[:, None]
    column = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))[None, :]
    return (column // 8 * 2 + row // 8 % 2) * (sums.shape[0] * 4) + row // 16 * 64 + row % 8 * 8 + column % 8


@gluon.jit
def _joined(
    own, partials, arrivals, tile, share, row_block, num_rows, steps, units, num_shares, row_blocks,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Return the sums over all programs of a tile and the number of rows to store, which is 0 except for the last."""
    SIZE: gl.constexpr = own.shape[0] * own.shape[1]
    elements = _places_of(own)
    # A program has part of its first and of its last tile.
    is_later = (share * units // num_shares // steps != tile).to(gl.int32)
    gl.store(partials + ((2 * share + is_later) * row_blocks + row_block) * SIZE + elements, own)
    begin = ((tile * steps + 1) * num_shares - 1) // units
    last = ((tile + 1) * steps * num_shares - 1) // units
    gl.thread_barrier()  # all threads must store before one thread signals the arrival
    counter = arrivals + tile * row_blocks + row_block
    is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - begin
    gl.store(counter, 0, mask=is_last)  # for the next layer, which waits for this one
    total = gl.zeros_like(own)
    for start in range(begin, gl.where(is_last, last + 1, begin), AT_ONCE):
        for ahead in gl.static_range(AT_ONCE):
            other = start + ahead
            is_later = (other * units // num_shares // steps != tile).to(gl.int32)
            place = partials + ((2 * other + is_later) * row_blocks + row_block) * SIZE + elements
            total += gl.load(place, mask=(elements >= 0) & (other <= last), other=0.0, cache_modifier=".cg")
    return total, gl.where(is_last, num_rows, 0)


@gluon.jit
def _store(
    total, bias, output, tile, row_block, num_stored, num_outputs,
    GATED: gl.constexpr, IS_GELU: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = total.shape[1]
    STORED: gl.constexpr = total.shape[0] // 2 if GATED else total.shape[0]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    if bias is not None:
        total = with_bias(total, bias, tile, num_outputs, GATED)
    result = gated(total, output.dtype.element_ty, IS_GELU) if GATED else total
    result = gl.convert_layout(result.to(output.dtype.element_ty), stored)
    outputs = tile * STORED + gl.arange(0, STORED, gl.SliceLayout(1, stored))[:, None]
    of_rows = row_block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))[None, :]
    gl.store(output + of_rows.to(gl.int64) * num_outputs + outputs, result, mask=of_rows < num_stored)


@gluon.jit
def _consume(
    tiles, tile_pairs, tile_scales, rows, full, empty, bias, output, partials, arrivals, num_rows, share,
    row_block, first_unit, end_unit, num_outputs, steps, units, num_shares, row_blocks,
    GATED: gl.constexpr, IS_GELU: gl.constexpr, OFFSET: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr,
    NUM_STAGES: gl.constexpr, SCALE_TYPE: gl.constexpr, AT_ONCE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Compute a share of the units and store its tiles."""
    TILE_ROWS: gl.constexpr = 16 * tiles.shape[1]
    BLOCK_M: gl.constexpr = rows.shape[1]
    SCALES_SUMS: gl.constexpr = BLOCK_M <= _MOST_SCALED_SUMS
    words: gl.constexpr = layout_of_words(tiles.shape[1], tiles.shape[4], num_warps)
    sums: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
        if SCALES_SUMS
        else gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    gdc_wait()  # before the first store: the memory may still be read by the previous kernel
    step = 0
    for tile in range(first_unit // steps, (end_unit + steps - 1) // steps):
        begin, end = gl.maximum(first_unit, tile * steps), gl.minimum(end_unit, (tile + 1) * steps)
        total = gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, sums)
        previous = gl.zeros([TILE_ROWS, 4 * tiles.shape[4] * 4], gl.bfloat16, operand)
        for unit in range(begin, end):
            stage = step % NUM_STAGES
            mbarrier.wait(full.index(stage), step // NUM_STAGES & 1)
            if SCALES_SUMS:
                total = _multiply_integers(
                    tiles, tile_pairs, tile_scales, rows, stage, total, words, CHUNKS, GROUPS, OFFSET, SCALE_TYPE,
                    num_warps,
                )  # fmt: skip
                gl.thread_barrier()  # all warps have read the words
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                last_stage = gl.where(unit > begin, (step + NUM_STAGES - 1) % NUM_STAGES, -1)
                total, previous = _multiply_values(
                    tiles, tile_pairs, rows, empty, stage, last_stage, total, previous, words, operand, CHUNKS, GROUPS,
                    OFFSET, SCALE_TYPE,
                )  # fmt: skip
            step += 1
        if not SCALES_SUMS:
            total, previous = warpgroup_mma_wait(0, deps=(total, previous))
            gl.thread_barrier()
            mbarrier.arrive(empty.index((step + NUM_STAGES - 1) % NUM_STAGES), count=1)
        num_stored = num_rows
        if end - begin < steps:
            total, num_stored = _joined(
                total, partials, arrivals, tile, share, row_block, num_rows, steps, units, num_shares, row_blocks,
                AT_ONCE,
            )  # fmt: skip
        _store(total, bias, output, tile, row_block, num_stored, num_outputs, GATED, IS_GELU, num_warps)


# Shapes and numbers of rows must not trigger a compilation: a start would compile one kernel per layer and number.
@gluon.jit(do_not_specialize=["num_rows", "steps", "units", "num_shares", "row_blocks"])
def w4_linear_kernel(
    weight, scales, x, bias, output, partials, arrivals, num_rows, num_outputs, steps, units, num_shares,
    row_blocks, GATED: gl.constexpr, IS_GELU: gl.constexpr, BOXES: gl.constexpr, WORD_STEPS: gl.constexpr,
    OFFSET: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr,
    NUM_STAGES: gl.constexpr, SCALE_TYPE: gl.constexpr, AT_ONCE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run program (share of the units, rows of x). Programs of the same units are adjacent."""
    gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if OFFSET == NONE else 2
    INPUTS: gl.constexpr = 16 * WORD_STEPS
    VALUE_ROWS: gl.constexpr = CHUNKS * BOXES * WORD_STEPS // 2
    WEIGHT_BYTES: gl.constexpr = VALUE_ROWS * 1024 + GROUPS * PARTS * BOXES * 128
    BYTES: gl.constexpr = WEIGHT_BYTES + CHUNKS * BLOCK_M * INPUTS * 2
    ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, VALUE_ROWS, 256], weight.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, GROUPS, 32 * BOXES * PARTS], scales.layout)
    rows = gl.allocate_shared_memory(x.dtype, [NUM_STAGES * CHUNKS, BLOCK_M, INPUTS], x.layout)
    plain4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NUM_PARTS: gl.constexpr = NUM_STAGES * GROUPS * PARTS
    tiles = ring._reinterpret(gl.int32, [NUM_STAGES * CHUNKS, 4 * BOXES, 8, 4, WORD_STEPS], plain4)
    tile_scales = scale_ring._reinterpret(gl.int16, [NUM_PARTS, 4 * BOXES, 8, 2], plain3)
    tile_pairs = scale_ring._reinterpret(gl.int32, [NUM_PARTS, 4 * BOXES, 8], plain2)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(early), count=1)
        mbarrier.init(empty.index(early), count=1)
    share, row_block = gl.program_id(0) // row_blocks, gl.program_id(0) % row_blocks
    first_unit, end_unit = share * units // num_shares, (share + 1) * units // num_shares
    gl.warp_specialize(
        [
            (_consume, (
                tiles, tile_pairs, tile_scales, rows, full, empty, bias, output, partials, arrivals, num_rows, share,
                row_block, first_unit, end_unit, num_outputs, steps, units, num_shares, row_blocks,
                GATED, IS_GELU, OFFSET, CHUNKS, GROUPS, NUM_STAGES, SCALE_TYPE, AT_ONCE, num_warps,
            )),
            (_produce, (
                weight, scales, x, ring, scale_ring, rows, full, empty, first_unit, end_unit - first_unit,
                row_block * BLOCK_M, steps, BYTES, VALUE_ROWS, GROUPS, INPUTS, CHUNKS, NUM_STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def w4_linear(x: Tensor, weight: W4Weight, bias: Tensor | None = None, is_gelu: bool = False) -> Tensor:
    """Return x @ weight.T + bias, or activation(gate) * up of a gated weight.

    Args:
        x: [T, K], bfloat16, contiguous, T <= MAX_ROWS.
        weight: [N, K].
        bias: [N], added to the float32 sums; None: 0.
        is_gelu: The activation is gelu_tanh, otherwise silu.

    Returns:
        [T, N], or [T, N / 2] of a gated weight, bfloat16. Gate and up are rounded before they are multiplied.
    """
    num_rows, (num_weights, num_inputs) = len(x), weight.shape
    num_outputs = num_weights // 2 if weight.is_gated else num_weights
    assert num_rows <= MAX_ROWS and x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == num_inputs
    output = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return output
    tiles = tiles_for(num_rows, scales_sums=num_rows <= exact_rows(weight))
    block_m, boxes, inputs = tiles.block_m, weight.tile_rows // 64, weight.tile_inputs
    parts, row_blocks = weight.scales.shape[2], triton.cdiv(num_rows, block_m)
    step_inputs = _step_inputs(num_inputs, weight.group, tiles.step_inputs)
    chunks, groups, steps = step_inputs // inputs, step_inputs // weight.group, num_inputs // step_inputs
    num_tiles = num_weights // weight.tile_rows
    weight_bytes = weight.tile_rows * step_inputs // 2 + groups * parts * boxes * 128
    stage_bytes = weight_bytes + block_m * step_inputs * 2
    free_bytes = _SHARED_BYTES // tiles.programs_per_sm - 2 * weight.tile_rows * block_m - 1024
    num_shares = min(num_tiles * steps, tiles.shares)
    num_warps = min(tiles.num_warps, 4 * boxes)
    assert num_tiles * row_blocks <= _MAX_TILES
    sizes = 2 * num_shares * row_blocks * weight.tile_rows * block_m
    w4_linear_kernel[(num_shares * row_blocks,)](
        _words(weight.values, chunks * boxes * inputs // 32, _WORD_COLUMNS),
        _words(weight.scales, groups, 32 * boxes * parts),
        _rows(x, block_m, inputs),
        bias,
        output,
        x.new_empty(sizes, dtype=torch.float32),
        _arrivals(x.device),
        num_rows,
        num_outputs,
        steps,
        num_tiles * steps,
        num_shares,
        row_blocks,
        GATED=weight.is_gated,
        IS_GELU=is_gelu,
        BOXES=boxes,
        WORD_STEPS=inputs // 16,
        OFFSET=int(weight.offset),
        BLOCK_M=block_m,
        CHUNKS=chunks,
        GROUPS=groups,
        NUM_STAGES=free_bytes // stage_bytes,
        SCALE_TYPE=gl.float16 if weight.scales.dtype == torch.float16 else gl.bfloat16,
        AT_ONCE=max(1, 64 // block_m),
        num_warps=num_warps,
        maxnreg=min(_REGISTERS // ((num_warps + 4) * 32 * tiles.programs_per_sm) // 8 * 8, 248),
        launch_pdl=True,
    )
    return output


def exact_rows(weight: W4Weight) -> int:
    """Return up to how many rows integers are exact; then a row has the same bits whatever their number."""
    return _EXACT_ROWS_WITH_MINIMA if weight.offset is Offset.MINIMUM else _EXACT_ROWS


def tiles_for(num_rows: int, *, scales_sums: bool) -> W4Tiles:
    """Return the tiles for a number of rows, whose sums are scaled, or the values."""
    if scales_sums:
        # The steps are those of any number of rows, and so are the bits.
        block_m = max(8, triton.next_power_of_2(num_rows))
        return W4Tiles(block_m, 256, 2, NUM_SMS, num_warps=4 if block_m == 32 else 8)
    block_m = 64 if num_rows <= 64 else _MAX_BLOCK_M
    return W4Tiles(block_m, 256 if block_m == 64 else 128, 1, NUM_SMS // triton.cdiv(num_rows, block_m))


def _step_inputs(num_inputs: int, group: int, most: int) -> int:
    """Return the inputs of a step: a divisor of K and a multiple of the group."""
    return next(size for size in (most, 256, 128, 64, 32) if num_inputs % size == 0 and size % group == 0)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of arrived programs per tile; zero between layers, which run one after another."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def _words(stored: Tensor, rows: int, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(stored.view(torch.int32).view(-1, width), [rows, width], layout)


def _rows(x: Tensor, rows: int, inputs: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, inputs], _layout(rows, inputs))


@cache
def _layout(rows: int, inputs: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, inputs], gl.bfloat16)
