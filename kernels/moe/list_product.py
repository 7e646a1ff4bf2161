"""The linear layers of experts on Hopper GPUs, at the speed of reading the weights.

The work list has blocks of up to BLOCK_M sorted rows of one expert; each block has tiles of 64 outputs (gated: 64 of
gate and 64 of up). Each program processes an even share of (block, tile) through one TMA-filled ring, as in
skinny_linear.py. Weights are the 64-row operand of wgmma, and each output is one chain of float32 sums over K in order,
so its bits depend neither on T nor on other rows. MXFP4 weights become exact bfloat16 in registers (mxfp4.py).
"""
# One warp loads, so that the others never wait for each other at a copy. The down product requests weights before its
# dependency wait: the routing was complete before the first product let this kernel start.

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe.activation import Activation, apply_gate, launch_options, num_halves, squared_relu
from kernels.moe.mxfp4 import OUTPUT_SCALE, TILE, Mxfp4Experts
from kernels.moe.routing import BLOCK_FIELDS, Routing
from kernels.moe.weights import ExpertProduct, ExpertWeight, Int4Experts, ScaledExperts
from kernels.skinny_linear import NUM_SMS

_SHARED_BYTES = 225 * 1024  # of an SM, less barriers
_REGISTERS = 65_536  # of an SM; the hardware reserves four warps for the loading one
# With more tokens of bfloat16 weights, grouped_product is as fast and reads the rows without a copy.
_MAX_LISTED_TOKENS = 16
_OUTPUT_SCALE = gl.constexpr(OUTPUT_SCALE)
# Four registers of A per word: ((w << a) & magnitudes) | ((w << b) & signs), times the scale of the row.
_UNPACK_WORD = """
    and.b32 t, {w}, 0x81C081C0;
    mul.bf16x2 {o0}, t, {upper};
    shl.b32 t, {w}, 3;
    and.b32 t, t, 0x81C081C0;
    mul.bf16x2 {o1}, t, {lower};
    shl.b32 t, {w}, 6;
    and.b32 t, t, 0x01C001C0;
    shl.b32 u, {w}, 1;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.bf16x2 {o2}, t, {upper};
    shr.b32 t, {w}, 3;
    and.b32 t, t, 0x01C001C0;
    shl.b32 u, {w}, 2;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.bf16x2 {o3}, t, {lower};
"""
_UNPACK = gl.constexpr(
    "{ .reg .b32 t, u;"
    + _UNPACK_WORD.format(w="$8", upper="$10", lower="$12", o0="$0", o1="$1", o2="$2", o3="$3")
    + _UNPACK_WORD.format(w="$9", upper="$11", lower="$13", o0="$4", o1="$5", o2="$6", o3="$7")
    + "}"
)
_UNPACK_OPERANDS = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r")


@dataclass(frozen=True)
class ListTiles:
    """How a product is cut.

    Attributes:
        chunks: Groups of 64 inputs per step; a divisor of K / 64.
        programs_per_sm: Programs that share an SM and its ring.
    """

    chunks: int
    programs_per_sm: int = 1


@gluon.jit
def _request_weights(
    weight, scales, ring, scale_ring, barriers, step, wanted, expert, tile,
    NUM_OUTPUTS: gl.constexpr, BOXES: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, STEPS: gl.constexpr,
    NUM_STAGES: gl.constexpr, IS_MXFP4: gl.constexpr,
):  # fmt: skip
    """Request the weights of a step. Its barrier also expects the rows, requested by _request_rows."""
    stage = step % NUM_STAGES
    barrier = barriers.index(stage)
    BOX_BYTES: gl.constexpr = 2176 if IS_MXFP4 else 8192
    mbarrier.expect(barrier, CHUNKS * (BOXES * BOX_BYTES + BLOCK_M * 128), pred=wanted)
    first_chunk = step % STEPS * CHUNKS
    for chunk in gl.static_range(CHUNKS):
        place = stage * CHUNKS + chunk
        if IS_MXFP4:
            number = ((expert * (NUM_OUTPUTS // 64) + tile) * (STEPS * CHUNKS) + first_chunk + chunk) * BOXES
            tma.async_copy_global_to_shared(weight, [number * 2, 0], barrier, ring.index(place), pred=wanted)
            tma.async_copy_global_to_shared(scales, [number, 0], barrier, scale_ring.index(place), pred=wanted)
        else:
            for box in gl.static_range(BOXES):
                row = (expert * BOXES + box) * NUM_OUTPUTS + tile * 64
                target = ring.index(place * BOXES + box)
                column = (first_chunk + chunk) * 64
                tma.async_copy_global_to_shared(weight, [row, column], barrier, target, pred=wanted)


@gluon.jit
def _request_rows(
    x, ring, barriers, step, wanted, first_row,
    CHUNKS: gl.constexpr, STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    stage = step % NUM_STAGES
    for chunk in gl.static_range(CHUNKS):
        place = [first_row, (step % STEPS * CHUNKS + chunk) * 64]
        tma.async_copy_global_to_shared(
            x, place, barriers.index(stage), ring.index(stage * CHUNKS + chunk), pred=wanted
        )


@gluon.jit
def _place_of(blocks, step, first_item, wanted, TILES: gl.constexpr, STEPS: gl.constexpr, FIELDS: gl.constexpr):
    """Return (expert, tile, first sorted row) of a step."""
    item = first_item + step // STEPS
    block = blocks + item // TILES * FIELDS
    return gl.load(block, mask=wanted, other=0), item % TILES, gl.load(block + 1, mask=wanted, other=0)


@gluon.constexpr_function
def _layout_of_words(boxes):
    """Return the layout of [warp, lane / 4, lane % 4, step]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]][: boxes + 1],
        block_bases=[],
        shape=[4 * boxes, 8, 4, 4],
    )


@gluon.jit
def _load_words(tiles, tile_scales, place, layout: gl.constexpr):
    """Return the words of a tile's values and scales."""
    return tiles.index(place).load(layout), tile_scales.index(place).load(gl.SliceLayout(2, gl.SliceLayout(3, layout)))


@gluon.jit
def _unpacked(values, scales, layout: gl.constexpr, operand: gl.constexpr):
    """Return an MXFP4 tile [16 * warps, 64] as bfloat16 in the registers of wgmma's left operand, times 2^-60."""
    of_step: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    bytes_ = gl.expand_dims(gl.expand_dims(scales, 2), 3)
    shifts = gl.arange(0, 4, of_step) // 2 * 16
    shifts = gl.expand_dims(gl.expand_dims(gl.expand_dims(shifts, 0), 1), 2)
    # The byte becomes the exponents of two bfloat16.
    upper = ((bytes_ >> shifts) & 255) * 0x00800080
    lower = ((bytes_ >> (shifts + 8)) & 255) * 0x00800080
    types: gl.constexpr = (gl.bfloat16,) * 8
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _UNPACK, _UNPACK_OPERANDS, [values, upper, lower], dtype=types, is_pure=True, pack=2
    )
    first = gl.join(gl.join(a0, a1), gl.join(a2, a3))
    second = gl.join(gl.join(b0, b1), gl.join(b2, b3))
    # warp, lane / 4, lane % 4, pair of steps, half, lower, right, step
    parts = gl.reshape(gl.join(first, second), [values.shape[0], 8, 4, 2, 2, 2, 2, 2])
    tile = gl.reshape(gl.permute(parts, [0, 5, 1, 3, 7, 6, 2, 4]), [values.shape[0] * 16, 64])
    return gl.convert_layout(tile, operand, assert_trivial=True)


@gluon.jit
def _sorted_rows(
    ids, positions, first_row, end_row, expert, num_tokens, layout: gl.constexpr,
    BLOCK_M: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """Return the sorted row of each column, and whether the expert computes it. TOP_K > 0: columns are tokens."""
    columns = gl.arange(0, BLOCK_M, layout)
    if TOP_K > 0:
        rows = gl.zeros([BLOCK_M], gl.int32, layout)
        used = rows > 0
        for slot in gl.static_range(TOP_K):
            place = columns * TOP_K + slot
            is_own = gl.load(ids + place, mask=columns < num_tokens, other=-1) == expert
            rows = gl.where(is_own, gl.load(positions + place, mask=columns < num_tokens, other=0), rows)
            used = used | is_own
        return rows, used
    return first_row + columns, first_row + columns < end_row


@gluon.jit
def _produce(
    weight, scales, x, ring, scale_ring, rows, full, empty, blocks, first_item, num_steps,
    NUM_OUTPUTS: gl.constexpr, TOP_K: gl.constexpr, FIELDS: gl.constexpr, BOXES: gl.constexpr,
    BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
    IS_MXFP4: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The first weights are requested before the dependency wait, the rows after it."""
    TILES: gl.constexpr = NUM_OUTPUTS // 64
    for early in gl.static_range(NUM_STAGES):
        expert, tile, _ = _place_of(blocks, early, first_item, early < num_steps, TILES, STEPS, FIELDS)
        _request_weights(
            weight, scales, ring, scale_ring, full, early, early < num_steps, expert, tile,
            NUM_OUTPUTS, BOXES, BLOCK_M, CHUNKS, STEPS, NUM_STAGES, IS_MXFP4,
        )  # fmt: skip
    gdc_wait()
    for early in gl.static_range(NUM_STAGES):
        _, _, row = _place_of(blocks, early, first_item, early < num_steps, TILES, STEPS, FIELDS)
        row = 0 if TOP_K > 0 else row
        _request_rows(x, rows, full, early, early < num_steps, row, CHUNKS, STEPS, NUM_STAGES)
    for step in range(NUM_STAGES, num_steps):
        expert, tile, row = _place_of(blocks, step, first_item, step < num_steps, TILES, STEPS, FIELDS)
        row = 0 if TOP_K > 0 else row
        mbarrier.wait(empty.index(step % NUM_STAGES), (step // NUM_STAGES & 1) ^ 1)
        _request_weights(
            weight, scales, ring, scale_ring, full, step, step < num_steps, expert, tile,
            NUM_OUTPUTS, BOXES, BLOCK_M, CHUNKS, STEPS, NUM_STAGES, IS_MXFP4,
        )  # fmt: skip
        _request_rows(x, rows, full, step, step < num_steps, row, CHUNKS, STEPS, NUM_STAGES)


@gluon.jit
def _multiply_mxfp4(
    tiles, tile_scales, rows, stage, total, words: gl.constexpr, operand: gl.constexpr, CHUNKS: gl.constexpr
):  # fmt: skip
    """Add the products of a step. A tile is unpacked while the last one is multiplied and the next one is loaded."""
    first_place = stage * CHUNKS
    values, scales = _load_words(tiles, tile_scales, first_place, words)
    next_values, next_scales, previous = values, scales, None
    for chunk in gl.static_range(CHUNKS):
        if chunk + 1 < CHUNKS:
            next_values, next_scales = _load_words(tiles, tile_scales, first_place + chunk + 1, words)
        left = _unpacked(values, scales, words, operand)
        total = warpgroup_mma(left, rows.index(first_place + chunk).permute((1, 0)), total, is_async=True)
        if chunk > 0:
            total, previous = warpgroup_mma_wait(1, deps=(total, previous))
        previous, values, scales = left, next_values, next_scales
    total, previous = warpgroup_mma_wait(0, deps=(total, previous))
    return total


@gluon.jit
def _gated(
    both, BLOCK_M: gl.constexpr, IS_GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
):  # fmt: skip
    """Return the gated [64, BLOCK_M] of [128, BLOCK_M] with rows of gate, then of up."""
    pairs: gl.constexpr = gl.BlockedLayout([8, 1, 2], [8, 4, 1], [1, 8, 1], [2, 0, 1])
    gate, up = gl.split(gl.convert_layout(gl.permute(gl.reshape(both, [2, 64, BLOCK_M]), [1, 2, 0]), pairs))
    return apply_gate(gate.to(gl.float32), up.to(gl.float32), IS_GELU, ALPHA, LIMIT, UP_OFFSET).to(both.dtype)


@gluon.jit
def _consume(
    tiles, tile_scales, rows, full, empty, bias, ids, positions, blocks, output, num_tokens, first_owned, first_item,
    end_item,
    NUM_OUTPUTS: gl.constexpr, TOP_K: gl.constexpr, FIELDS: gl.constexpr, GATED: gl.constexpr,
    SQUARED: gl.constexpr, IS_GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
    BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
    IS_MXFP4: gl.constexpr,
):  # fmt: skip
    """Compute the tiles and store them. Four warps have 64 rows of weights each."""
    BOXES: gl.constexpr = 2 if GATED else 1
    TILES: gl.constexpr = NUM_OUTPUTS // 64
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * BOXES, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    words: gl.constexpr = _layout_of_words(BOXES)
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4 * BOXES], [0, 1])
    gdc_wait()  # before the first store: the memory may still be read by the previous kernel
    step = 0
    for item in range(first_item, end_item):
        block, tile = blocks + item // TILES * FIELDS, item % TILES
        expert, first_row, end_row = gl.load(block), gl.load(block + 1), gl.load(block + 2)
        places, used = _sorted_rows(
            ids, positions, first_row, end_row, expert + first_owned, num_tokens, gl.SliceLayout(0, stored),
            BLOCK_M, TOP_K,
        )  # fmt: skip
        of_weight = gl.arange(0, 64 * BOXES, gl.SliceLayout(1, sums))
        of_bias = gl.zeros([64 * BOXES], gl.float32, gl.SliceLayout(1, sums))
        if bias is not None:
            outputs = tile * 64 + of_weight % 64 + of_weight // 64 * NUM_OUTPUTS
            of_bias = gl.load(bias + expert * (NUM_OUTPUTS * BOXES) + outputs).to(gl.float32)
        total = gl.zeros([64 * BOXES, BLOCK_M], gl.float32, sums)
        for _ in range(STEPS):
            stage = step % NUM_STAGES
            mbarrier.wait(full.index(stage), step // NUM_STAGES & 1)
            if IS_MXFP4:
                total = _multiply_mxfp4(tiles, tile_scales, rows, stage, total, words, operand, CHUNKS)
                gl.thread_barrier()  # all warps have read the words
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                for chunk in gl.static_range(CHUNKS):
                    columns = rows.index(stage * CHUNKS + chunk).permute((1, 0))
                    total = warpgroup_mma(tiles.index(stage * CHUNKS + chunk), columns, total, is_async=True)
                # The previous step's products are done, so its stage is free; those of this step still run.
                total = warpgroup_mma_wait(CHUNKS, deps=(total,))
                mbarrier.arrive(empty.index((step + NUM_STAGES - 1) % NUM_STAGES), count=1, pred=step > 0)
            step += 1
        if IS_MXFP4:
            total *= _OUTPUT_SCALE
        else:
            total = warpgroup_mma_wait(0, deps=(total,))
        result = (total + of_bias[:, None]).to(output.dtype.element_ty)
        if GATED:
            result = _gated(result, BLOCK_M, IS_GELU, ALPHA, LIMIT, UP_OFFSET)
        if SQUARED:
            result = squared_relu(result.to(gl.float32)).to(result.dtype)
        columns_out = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, stored))
        target = output + places.to(gl.int64)[None, :] * NUM_OUTPUTS + columns_out[:, None]
        gl.store(target, gl.convert_layout(result, stored), mask=used[None, :] & (columns_out >= 0)[:, None])


# The number of tokens changes from step to step and must not trigger a compilation.
@gluon.jit(do_not_specialize=["num_tokens", "first_owned"])
def list_product_kernel(
    weight, scales, x, bias, ids, positions, blocks, num_blocks, output, num_tokens, first_owned,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, TOP_K: gl.constexpr, FIELDS: gl.constexpr,
    GATED: gl.constexpr, SQUARED: gl.constexpr, IS_GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, NUM_STAGES: gl.constexpr,
    IS_MXFP4: gl.constexpr,
):  # fmt: skip
    """Run an even share of the tiles of all blocks. TOP_K > 0: rows of x are tokens; 0: sorted rows."""
    BOXES: gl.constexpr = 2 if GATED else 1
    TILES: gl.constexpr = NUM_OUTPUTS // 64
    STEPS: gl.constexpr = NUM_INPUTS // (64 * CHUNKS)
    if IS_MXFP4:
        ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES * CHUNKS, BOXES * 2, 256], weight.layout)
        scale_ring = gl.allocate_shared_memory(gl.int32, [NUM_STAGES * CHUNKS, BOXES, 32], scales.layout)
        plain4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        tiles = ring._reinterpret(gl.int32, [NUM_STAGES * CHUNKS, 4 * BOXES, 8, 4, 4], plain4)
        tile_scales = scale_ring._reinterpret(gl.int32, [NUM_STAGES * CHUNKS, 4 * BOXES, 8], plain2)
    else:
        ring = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES * CHUNKS * BOXES, 64, 64], weight.layout)
        tiles = ring._reinterpret(weight.dtype, [NUM_STAGES * CHUNKS, 64 * BOXES, 64], weight.layout)
        scale_ring, tile_scales = ring, ring
    rows = gl.allocate_shared_memory(x.dtype, [NUM_STAGES * CHUNKS, BLOCK_M, 64], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(early), count=1)
        mbarrier.init(empty.index(early), count=1)
    if GATED or SQUARED:  # the first product
        gdc_wait()
    # After this wait, so that the down product finds the routing complete when it starts.
    gdc_launch_dependents()
    num_items = gl.load(num_blocks) * TILES
    first_item = gl.program_id(0) * num_items // gl.num_programs(0)
    end_item = (gl.program_id(0) + 1) * num_items // gl.num_programs(0)
    gl.warp_specialize(
        [
            (_consume, (
                tiles, tile_scales, rows, full, empty, bias, ids, positions, blocks, output, num_tokens, first_owned,
                first_item, end_item, NUM_OUTPUTS, TOP_K, FIELDS, GATED, SQUARED, IS_GELU, ALPHA, LIMIT, UP_OFFSET,
                BLOCK_M, CHUNKS, STEPS, NUM_STAGES, IS_MXFP4,
            )),
            (_produce, (
                weight, scales, x, ring, scale_ring, rows, full, empty, blocks, first_item,
                (end_item - first_item) * STEPS, NUM_OUTPUTS, TOP_K, FIELDS, BOXES, BLOCK_M, CHUNKS, STEPS,
                NUM_STAGES, IS_MXFP4,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def list_product(
    x: Tensor, product: ExpertProduct, routing: Routing, activation: Activation | None, tiles: ListTiles
) -> Tensor:
    """Compute one product of the owned experts.

    Args:
        x: bfloat16. Of the first product, if reads_tokens(): [T, K]; otherwise sorted rows [T * k, K].
        product: bfloat16 [E, N, K], or MXFP4; N a multiple of 64 (gated: 128), K of 64 * chunks.
        routing: From route().
        activation: After the first product; with a gate, its weight has 2 * N rows. None: the second product.
        tiles: From list_tiles_of().

    Returns:
        [T * k, N] in sorted order, bfloat16; rows of experts that are not owned are not written.
    """
    weight = product.weight
    assert not isinstance(weight, ScaledExperts | Int4Experts)
    experts, num_rows, num_inputs = weight.shape
    boxes = num_halves(activation)
    num_outputs, block_m = num_rows // boxes, routing.block_rows
    is_mxfp4 = isinstance(weight, Mxfp4Experts)
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == num_inputs
    assert num_outputs % TILE == 0 and num_inputs % (TILE * tiles.chunks) == 0
    output = x.new_empty(routing.num_pairs, num_outputs)
    if routing.num_pairs == 0:
        return output
    num_tokens, top_k = routing.ids.shape
    has_tokens = activation is not None and reads_tokens(routing)
    assert len(x) == (num_tokens if has_tokens else routing.num_pairs)
    if isinstance(weight, Mxfp4Experts):
        values, scales = _words(weight.values, 2 * boxes, 256), _words(weight.scales, boxes, 32)
    else:
        assert isinstance(weight, Tensor) and weight.dtype == x.dtype and weight.is_contiguous()
        values, scales = _descriptor(weight.view(experts * num_rows, num_inputs), TILE), None
    box_bytes = 2176 if is_mxfp4 else 2 * TILE * TILE
    stage_bytes = tiles.chunks * (boxes * box_bytes + block_m * TILE * 2)
    free_bytes = _SHARED_BYTES // tiles.programs_per_sm - boxes * 2 * TILE * block_m - 1024
    assert free_bytes >= stage_bytes
    num_programs = min(len(routing.blocks) * (num_outputs // TILE), NUM_SMS * tiles.programs_per_sm)
    list_product_kernel[(num_programs,)](
        values,
        scales,
        _descriptor(x, block_m),
        product.bias,
        routing.ids,
        routing.positions,
        routing.blocks,
        routing.num_blocks,
        output,
        num_tokens,
        routing.owned.start,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TOP_K=top_k if has_tokens else 0,
        FIELDS=BLOCK_FIELDS,
        BLOCK_M=block_m,
        CHUNKS=tiles.chunks,
        NUM_STAGES=free_bytes // stage_bytes,
        IS_MXFP4=is_mxfp4,
        num_warps=4 * boxes,
        maxnreg=min(_REGISTERS // ((boxes + 1) * 128 * tiles.programs_per_sm) // 8 * 8, 248),
        launch_pdl=True,
        **launch_options(activation),
    )
    return output


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device runs this kernel. Its tiles were measured with 132 SMs only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def list_tiles_of(weight: ExpertWeight, is_gated: bool, routing: Routing) -> ListTiles | None:
    """Return the tiles for a weight on a Hopper GPU; None: grouped_product.py serves it."""
    if isinstance(weight, ScaledExperts | Int4Experts):
        return None
    chunks = weight.shape[2] // TILE
    if isinstance(weight, Mxfp4Experts):
        return _mxfp4_tiles(chunks, is_gated, len(routing.ids), routing.block_rows)
    if len(routing.ids) > max_listed_tokens(weight, is_gated):
        return None
    if len(routing.ids) <= 4:
        return ListTiles(_largest_divisor(chunks, 2), programs_per_sm=2)
    return ListTiles(_largest_divisor(chunks, 4))


def max_listed_tokens(weight: Tensor, is_gated: bool) -> int:
    """Return up to how many tokens of a step this kernel serves a weight in 16 or 32 bits; 0: it does not."""
    _, num_rows, num_inputs = weight.shape
    is_served = weight.dtype == torch.bfloat16 and num_rows % (TILE * (1 + is_gated)) == 0 and num_inputs % TILE == 0
    return _MAX_LISTED_TOKENS if is_served else 0


def reads_tokens(routing: Routing) -> bool:
    """Return whether the first product reads the rows of all tokens instead of sorted rows."""
    return len(routing.ids) <= routing.block_rows


def _mxfp4_tiles(chunks: int, is_gated: bool, num_tokens: int, block_rows: int) -> ListTiles:
    """Return the fastest tiles measured for gpt-oss-20b on an H100 at 1 to 2,048 tokens."""
    if block_rows <= 16 and (num_tokens <= 8 or not is_gated):
        return ListTiles(_largest_divisor(chunks, 5), programs_per_sm=2)
    if is_gated:
        return ListTiles(_largest_divisor(chunks, 5 if block_rows == 64 else 3))
    return ListTiles(1, programs_per_sm=2)


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, TILE], _layout(rows))


def _words(stored: Tensor, rows: int, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(stored.view(-1, width), [rows, width], layout)


@cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, TILE], gl.bfloat16)
