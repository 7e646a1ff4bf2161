"""Linear layers with few rows and a large fp8 weight on Hopper GPUs, at the speed of reading the weight.

Products of 128 elements of K are summed by the tensor cores, whose fp8 accumulator has 14 bits on Hopper. These sums
are scaled and added in float32 in the order of K. A row's result depends neither on other rows nor, for tiles with the
same `halves`, on T. The structure is that of skinny_linear.py. If long rows have few tiles, two programs take half of K
each, and the second to finish adds the other's sums. Gluon has no interpreter.
"""
# PLR/RUF: tuples in kernels do not support star expressions.
# ruff: noqa: RUF005

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.scaled import GROUP, Scaled
from kernels.skinny_linear import NUM_SMS, store_transposed

MAX_ROWS = 256
_SHARED_BYTES = 225 * 1024
_MAX_TILES = 1024  # tiles times row blocks, when K is halved


@dataclass(frozen=True)
class Fp8Tiles:
    """How a linear layer is cut.

    Attributes:
        block_n: Weight rows per tile; gated: gate and up together.
        block_k: Elements of K per step.
        row_blocks: Programs that share the rows of x, at most 128 rows each.
        halves: 2: two programs take half of K each.
    """

    block_n: int
    block_k: int
    row_blocks: int = 1
    halves: int = 1


@gluon.jit
def _load_weights(
    weight, ring, barriers, step, num_steps, first_tile, first_column,
    UP: gl.constexpr, BOXES: gl.constexpr, BOX_N: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr,
    STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Request the weights of a step. Its barrier also expects the rows of x, requested by _load_rows."""
    wanted = step < num_steps
    stage = step % NUM_STAGES
    row = (first_tile + step // STEPS) * BOX_N
    mbarrier.expect(barriers.index(stage), (BOXES * BOX_N + BLOCK_M) * CHUNKS * 128, pred=wanted)
    for chunk in gl.static_range(CHUNKS):
        column = first_column + (step % STEPS * CHUNKS + chunk) * 128
        for box in gl.static_range(BOXES):
            target = ring.index((stage * CHUNKS + chunk) * BOXES + box)
            place = [row + box * UP, column]
            tma.async_copy_global_to_shared(weight, place, barriers.index(stage), target, pred=wanted)


@gluon.jit
def _load_rows(
    x, ring, barriers, step, num_steps, first_row, first_column,
    CHUNKS: gl.constexpr, STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    stage = step % NUM_STAGES
    for chunk in gl.static_range(CHUNKS):
        place = [first_row, first_column + (step % STEPS * CHUNKS + chunk) * 128]
        target = ring.index(stage * CHUNKS + chunk)
        tma.async_copy_global_to_shared(x, place, barriers.index(stage), target, pred=step < num_steps)


@gluon.jit
def _scales_of_step(
    weight_scales, x_scales, first_group, row, num_rows, row_of_x,
    NUM_OUTPUTS: gl.constexpr, GROUPS: gl.constexpr, BOXES: gl.constexpr, CHUNKS: gl.constexpr,
    ROWS_GROUPED: gl.constexpr, WEIGHT_GROUPED: gl.constexpr,
):  # fmt: skip
    """Return the factors of a step's products, a tuple [CHUNKS * BOXES]; 1 where a scale covers a whole row."""
    scales = ()
    for chunk in gl.static_range(CHUNKS):
        of_rows = 1.0
        if ROWS_GROUPED:
            place = (first_group + chunk) * num_rows + row_of_x
            of_rows = gl.load(x_scales + place, mask=row_of_x < num_rows, other=0.0)[None, :]
        for box in gl.static_range(BOXES):
            of_box = of_rows
            if WEIGHT_GROUPED:
                block = (row + box * NUM_OUTPUTS) // 128 * GROUPS + first_group + chunk
                of_box = of_rows * gl.load(weight_scales + block)
            scales = scales + (of_box,)  # type: ignore[assignment]
    return scales


@gluon.jit
def _start_products(weights, rows, zeros, stage, BOXES: gl.constexpr, CHUNKS: gl.constexpr):
    """Start the products of a step, each over 128 elements of K, and return them as a tuple [CHUNKS * BOXES]."""
    products = ()
    for chunk in gl.static_range(CHUNKS):
        place = stage * CHUNKS + chunk
        columns = rows.index(place).permute((1, 0))
        for box in gl.static_range(BOXES):
            of_box = weights.index(place * BOXES + box)
            products = products + (warpgroup_mma(of_box, columns, zeros, use_acc=False, is_async=True),)  # type: ignore[assignment]
    return products


@gluon.jit
def _scaled_by_rows(
    sums, of_outputs, x_scales, row_of_x, num_rows, ROWS_GROUPED: gl.constexpr, WEIGHT_GROUPED: gl.constexpr
):
    """Multiply `sums` with the per-row scales of the weight and of x."""
    if not WEIGHT_GROUPED:
        sums *= gl.load(of_outputs)[:, None]
    if not ROWS_GROUPED:
        sums *= gl.load(x_scales + row_of_x, mask=row_of_x < num_rows, other=0.0)[None, :]
    return sums


@gluon.jit
def _gated(gate, up, dtype: gl.constexpr):
    """Return silu(gate) * up of the rounded inputs, as if they had been stored."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _joined(
    own, halves, arrivals, place, half, num_rows, BOX_N: gl.constexpr, BLOCK_M: gl.constexpr, sums: gl.constexpr
):  # fmt: skip
    """Return the sum over both halves of K and the number of rows to store, which is 0 for the first program.

    Both orders of arrival give the same sum.
    """
    elements = gl.arange(0, BOX_N, gl.SliceLayout(1, sums))[:, None] * BLOCK_M
    elements += gl.arange(0, BLOCK_M, gl.SliceLayout(0, sums))[None, :]
    gl.store(halves + (2 * place + half) * (BOX_N * BLOCK_M) + elements, own)
    gl.thread_barrier()  # all threads must store before one thread signals the arrival
    is_second = gl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu") == 1
    other = halves + (2 * place + 1 - half) * (BOX_N * BLOCK_M) + elements
    own += gl.load(other, mask=(elements >= 0) & is_second, other=0.0, cache_modifier=".cg")
    gl.store(arrivals + place, 0, mask=is_second)  # reset for the next layer, which waits for this one
    return own, gl.where(is_second, num_rows, 0)


# The number of rows changes from step to step and must not trigger a compilation.
@gluon.jit(do_not_specialize=["num_rows"])
def fp8_linear_kernel(
    weight, weight_scales, x, x_scales, output, halves, arrivals, num_rows,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GATED: gl.constexpr,
    ROWS_GROUPED: gl.constexpr, WEIGHT_GROUPED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, CHUNKS: gl.constexpr, NUM_STAGES: gl.constexpr,
    ROW_BLOCKS: gl.constexpr, HALVES: gl.constexpr, NUM_SHARES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run program (share of the tiles, rows of x, half of K). Programs of the same tiles are adjacent."""
    gdc_launch_dependents()
    BOXES: gl.constexpr = 2 if GATED else 1
    BOX_N: gl.constexpr = BLOCK_N // BOXES
    GROUPS: gl.constexpr = NUM_INPUTS // 128
    STEPS: gl.constexpr = GROUPS // CHUNKS // HALVES
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 32])
    weights = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES * CHUNKS * BOXES, BOX_N, 128], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [NUM_STAGES * CHUNKS, BLOCK_M, 128], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(barriers.index(early), count=1)
    NUM_TILES: gl.constexpr = NUM_OUTPUTS // BOX_N
    program = gl.program_id(0) // HALVES
    first_column = gl.program_id(0) % HALVES * STEPS * CHUNKS * 128
    share, first_row = program // ROW_BLOCKS, program % ROW_BLOCKS * BLOCK_M
    first_tile = share * NUM_TILES // NUM_SHARES
    num_tiles = (share + 1) * NUM_TILES // NUM_SHARES - first_tile
    num_steps = num_tiles * STEPS
    for early in gl.static_range(NUM_STAGES):
        _load_weights(
            weight, weights, barriers, early, num_steps, first_tile, first_column,
            NUM_OUTPUTS, BOXES, BOX_N, BLOCK_M, CHUNKS, STEPS, NUM_STAGES,
        )  # fmt: skip
    gdc_wait()
    for early in gl.static_range(NUM_STAGES):
        _load_rows(x, rows, barriers, early, num_steps, first_row, first_column, CHUNKS, STEPS, NUM_STAGES)
    row_of_x = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, sums))
    zeros = gl.zeros([BOX_N, BLOCK_M], gl.float32, sums)
    step = 0
    for tile in range(first_tile, first_tile + num_tiles):
        first = gl.zeros([BOX_N, BLOCK_M], gl.float32, sums)
        second = gl.zeros([BOX_N, BLOCK_M], gl.float32, sums)
        for step_of_tile in range(STEPS):
            scales = _scales_of_step(  # loaded while the step's data is in flight
                weight_scales, x_scales, first_column // 128 + step_of_tile * CHUNKS, tile * BOX_N, num_rows, row_of_x,
                NUM_OUTPUTS, GROUPS, BOXES, CHUNKS, ROWS_GROUPED, WEIGHT_GROUPED,
            )  # fmt: skip
            stage = step % NUM_STAGES
            mbarrier.wait(barriers.index(stage), step // NUM_STAGES & 1)
            products = _start_products(weights, rows, zeros, stage, BOXES, CHUNKS)
            for chunk in gl.static_range(CHUNKS):
                product = warpgroup_mma_wait((CHUNKS - chunk) * BOXES - 1, deps=(products[chunk * BOXES],))
                first += product * scales[chunk * BOXES]
                if GATED:
                    product = warpgroup_mma_wait((CHUNKS - chunk) * BOXES - 2, deps=(products[chunk * BOXES + 1],))
                    second += product * scales[chunk * BOXES + 1]
            gl.thread_barrier()  # all warps are done with this step, so its stage is free
            _load_weights(
                weight, weights, barriers, step + NUM_STAGES, num_steps, first_tile, first_column,
                NUM_OUTPUTS, BOXES, BOX_N, BLOCK_M, CHUNKS, STEPS, NUM_STAGES,
            )  # fmt: skip
            _load_rows(
                x, rows, barriers, step + NUM_STAGES, num_steps, first_row, first_column, CHUNKS, STEPS, NUM_STAGES
            )
            step += 1
        num_stored = num_rows
        if HALVES == 2:
            place, half = tile * ROW_BLOCKS + program % ROW_BLOCKS, gl.program_id(0) % 2
            first, num_stored = _joined(first, halves, arrivals, place, half, num_rows, BOX_N, BLOCK_M, sums)
        of_outputs = weight_scales + tile * BOX_N + gl.arange(0, BOX_N, gl.SliceLayout(1, sums))
        result = _scaled_by_rows(first, of_outputs, x_scales, row_of_x, num_rows, ROWS_GROUPED, WEIGHT_GROUPED)
        if GATED:
            of_up = of_outputs + NUM_OUTPUTS
            up = _scaled_by_rows(second, of_up, x_scales, row_of_x, num_rows, ROWS_GROUPED, WEIGHT_GROUPED)
            result = _gated(result, up, output.dtype.element_ty)
        store_transposed(
            result.to(output.dtype.element_ty),
            output,
            tile,
            first_row,
            num_stored,
            NUM_OUTPUTS,
            BOX_N,
            BLOCK_M,
            num_warps,
        )


def fp8_linear(x: Scaled, weight: Scaled, tiles: Fp8Tiles) -> Tensor:
    """Return x @ weight.T.

    Args:
        x: [T, K], T <= MAX_ROWS, K a multiple of 128; scales per row or per 128 elements.
        weight: [N, K]; scales per row or per 128 x 128 block.
        tiles: From fp8_tiles().

    Returns:
        [T, N], bfloat16.
    """
    return _launch(x, weight, tiles, len(weight), is_gated=False)


def gated_fp8_linear(x: Scaled, weight: Scaled, tiles: Fp8Tiles) -> Tensor:
    """Return silu(gate) * up, [T, N], bfloat16, where gate and up are the two halves of weight [2 * N, K]."""
    return _launch(x, weight, tiles, len(weight) // 2, is_gated=True)


def _launch(x: Scaled, weight: Scaled, tiles: Fp8Tiles, num_outputs: int, is_gated: bool) -> Tensor:
    num_rows, num_inputs = x.values.shape
    boxes = 2 if is_gated else 1
    box_n = tiles.block_n // boxes
    assert num_rows <= MAX_ROWS and x.values.dtype == weight.values.dtype == torch.float8_e4m3fn
    assert weight.values.shape[1] == num_inputs and x.values.is_contiguous() and weight.values.is_contiguous()
    assert num_outputs % box_n == 0 and num_inputs % tiles.block_k == 0 and tiles.block_k % GROUP == 0
    assert x.scales.shape == ((num_inputs // GROUP, num_rows) if x.is_grouped else (num_rows,))
    if weight.is_grouped:
        assert weight.scales.shape == (len(weight) // GROUP, num_inputs // GROUP) and len(weight) % GROUP == 0
        assert num_outputs % GROUP == 0 and GROUP % box_n == 0
    assert x.scales.is_contiguous() and weight.scales.is_contiguous()
    output = x.values.new_empty(num_rows, num_outputs, dtype=torch.bfloat16)
    if num_rows == 0:
        return output
    assert num_rows <= 128 * tiles.row_blocks
    block_m = max(8, triton.next_power_of_2(triton.cdiv(num_rows, tiles.row_blocks)))  # wgmma has no fewer columns
    stage_bytes = (tiles.block_n + block_m) * tiles.block_k
    num_shares = min(num_outputs // box_n, NUM_SMS // (tiles.row_blocks * tiles.halves))
    halves = None
    if tiles.halves == 2:
        num_places = num_outputs // box_n * tiles.row_blocks
        assert not is_gated and num_places <= _MAX_TILES and num_inputs % (2 * tiles.block_k) == 0
        halves = x.values.new_empty(2 * num_places * box_n * block_m, dtype=torch.float32)
    fp8_linear_kernel[(num_shares * tiles.row_blocks * tiles.halves,)](
        _descriptor(weight.values, box_n),
        weight.scales,
        _descriptor(x.values, block_m),
        x.scales,
        output,
        halves,
        _arrivals(x.values.device),
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        GATED=is_gated,
        ROWS_GROUPED=x.is_grouped,
        WEIGHT_GROUPED=weight.is_grouped,
        BLOCK_N=tiles.block_n,
        BLOCK_M=block_m,
        CHUNKS=tiles.block_k // GROUP,
        NUM_STAGES=(_SHARED_BYTES - output.element_size() * box_n * block_m) // stage_bytes,
        ROW_BLOCKS=tiles.row_blocks,
        HALVES=tiles.halves,
        NUM_SHARES=num_shares,
        num_warps=4,
        launch_pdl=True,
    )
    return output


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Return the counters of arrived programs per tile; zero between layers, which run one after another."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def _descriptor(values: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(values, [rows, GROUP], _layout(rows))


@cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, GROUP], gl.float8e4nv)
