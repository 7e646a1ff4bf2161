"""Linear layers with few rows and a large bfloat16 weight on Hopper GPUs, at the speed of reading the weight.

Each output is one chain of float32 sums over K in order, rounded once (gated: gate and up are rounded, then their
product), so a row's result depends neither on T nor on other rows (ADR 0026). A tile has BLOCK_N weight rows; each
program, one per SM, processes an even share of tiles through one TMA-filled ring of NUM_STAGES steps. With too few
tiles, ROW_BLOCKS programs share a tile with BLOCK_M rows of x each: memory is read once, L2 by each of them.
"""
# Weights are the 64-row operand of wgmma and rows of x its columns, so 8 rows of x cost 8 columns. Weights do not
# depend on the previous kernel: the whole ring is requested before the dependency wait, so memory does not idle between
# kernels.

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

MAX_ROWS = 128
NUM_SMS = 132  # of an H100 or H200
# A program may use 227 KiB; the rest is for barriers and for transposing the outputs.
_SHARED_BYTES = 225 * 1024


@dataclass(frozen=True)
class Tiles:
    """How a linear layer is cut.

    Attributes:
        block_n: Weight rows per tile; gated: gate and up together.
        block_k: Elements of K per step.
        num_warps: Warps per program.
        row_blocks: Programs that share the rows of x.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    row_blocks: int = 1


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    exact = torch.promote_types(x.dtype, torch.float32)
    exact_bias = None if bias is None else bias.to(exact)
    return torch.nn.functional.linear(x.to(exact), weight.to(exact), exact_bias).to(x.dtype)


def gated_skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = skinny_linear_reference(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@gluon.jit
def _load_weights(
    weight, ring, barriers, step, num_steps, first_tile,
    UP: gl.constexpr, BOXES: gl.constexpr, BOX_N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Request the weights of a step. Its barrier also expects the rows of x, requested by _load_rows."""
    wanted = step < num_steps
    barrier = barriers.index(step % NUM_STAGES)
    row = (first_tile + step // STEPS) * BOX_N
    mbarrier.expect(barrier, (BOXES * BOX_N + BLOCK_M) * BLOCK_K * 2, pred=wanted)
    for box in gl.static_range(BOXES):
        place = [row + box * UP, step % STEPS * BLOCK_K]
        target = ring.index(step % NUM_STAGES * BOXES + box)
        tma.async_copy_global_to_shared(weight, place, barrier, target, pred=wanted)


@gluon.jit
def _load_rows(
    x, ring, barriers, step, num_steps, first_row,
    BLOCK_K: gl.constexpr, STEPS: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    stage = step % NUM_STAGES
    place = [first_row, step % STEPS * BLOCK_K]
    tma.async_copy_global_to_shared(x, place, barriers.index(stage), ring.index(stage), pred=step < num_steps)


@gluon.jit
def store_transposed(
    values, output, tile, first_row, num_rows,
    NUM_OUTPUTS: gl.constexpr, BOX_N: gl.constexpr, BLOCK_M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Store values [BOX_N, BLOCK_M] as columns of output [num_rows, NUM_OUTPUTS], transposed for 16-byte writes."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    transposed = gl.convert_layout(values, layout)
    columns = tile * BOX_N + gl.arange(0, BOX_N, gl.SliceLayout(1, layout))[:, None]
    rows = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))[None, :]
    gl.store(output + rows * NUM_OUTPUTS + columns, transposed, mask=rows < num_rows)


@gluon.jit
def _add_bias(sums, bias, first_output, BOX_N: gl.constexpr, layout: gl.constexpr):
    """Add bias[first_output + i] to row i of sums [BOX_N, BLOCK_M] in float32, before the rounding."""
    if bias is not None:
        outputs = first_output + gl.arange(0, BOX_N, gl.SliceLayout(1, layout))
        sums += gl.load(bias + outputs).to(gl.float32)[:, None]
    return sums


# The number of rows changes from step to step and must not trigger a compilation.
@gluon.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    weight, x, output, bias, num_rows,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, NUM_STAGES: gl.constexpr, ROW_BLOCKS: gl.constexpr,
    NUM_SHARES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run program (share of the tiles, rows of x). Programs of the same tiles are adjacent."""
    gdc_launch_dependents()
    # A gated tile is BLOCK_N / 2 rows of gate and the same rows of up, NUM_OUTPUTS rows further down.
    BOXES: gl.constexpr = 2 if GATED else 1
    BOX_N: gl.constexpr = BLOCK_N // BOXES
    STEPS: gl.constexpr = NUM_INPUTS // BLOCK_K
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    weights = gl.allocate_shared_memory(weight.dtype, [NUM_STAGES * BOXES, BOX_N, BLOCK_K], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [NUM_STAGES, BLOCK_M, BLOCK_K], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(barriers.index(early), count=1)
    NUM_TILES: gl.constexpr = NUM_OUTPUTS // BOX_N
    share, first_row = gl.program_id(0) // ROW_BLOCKS, gl.program_id(0) % ROW_BLOCKS * BLOCK_M
    first_tile = share * NUM_TILES // NUM_SHARES
    num_tiles = (share + 1) * NUM_TILES // NUM_SHARES - first_tile
    num_steps = num_tiles * STEPS
    for early in gl.static_range(NUM_STAGES):
        _load_weights(
            weight, weights, barriers, early, num_steps, first_tile,
            NUM_OUTPUTS, BOXES, BOX_N, BLOCK_M, BLOCK_K, STEPS, NUM_STAGES,
        )  # fmt: skip
    gdc_wait()
    for early in gl.static_range(NUM_STAGES):
        _load_rows(x, rows, barriers, early, num_steps, first_row, BLOCK_K, STEPS, NUM_STAGES)
    step = 0
    for tile in range(first_tile, first_tile + num_tiles):
        first = gl.zeros([BOX_N, BLOCK_M], gl.float32, sums)
        second = gl.zeros([BOX_N, BLOCK_M], gl.float32, sums)
        for _ in range(STEPS):
            stage = step % NUM_STAGES
            mbarrier.wait(barriers.index(stage), step // NUM_STAGES & 1)
            columns = rows.index(stage).permute((1, 0))
            first = warpgroup_mma(weights.index(stage * BOXES), columns, first, is_async=True)
            if GATED:
                second = warpgroup_mma(weights.index(stage * BOXES + 1), columns, second, is_async=True)
                first, second = warpgroup_mma_wait(2, deps=(first, second))
            else:
                first = warpgroup_mma_wait(1, deps=(first,))
            # The previous step's products are done, so its stage is free; those of this step still run.
            ahead = gl.where(step > 0, step - 1 + NUM_STAGES, num_steps)
            _load_weights(
                weight, weights, barriers, ahead, num_steps, first_tile,
                NUM_OUTPUTS, BOXES, BOX_N, BLOCK_M, BLOCK_K, STEPS, NUM_STAGES,
            )  # fmt: skip
            _load_rows(x, rows, barriers, ahead, num_steps, first_row, BLOCK_K, STEPS, NUM_STAGES)
            step += 1
        if GATED:
            first, second = warpgroup_mma_wait(0, deps=(first, second))
            first = _add_bias(first, bias, tile * BOX_N, BOX_N, sums)
            second = _add_bias(second, bias, NUM_OUTPUTS + tile * BOX_N, BOX_N, sums)
            gate = first.to(output.dtype.element_ty).to(gl.float32)
            up = second.to(output.dtype.element_ty).to(gl.float32)
            result = gate / (1.0 + gl.exp(-gate)) * up
        else:
            result = _add_bias(warpgroup_mma_wait(0, deps=(first,)), bias, tile * BOX_N, BOX_N, sums)
        result = result.to(output.dtype.element_ty)
        store_transposed(result, output, tile, first_row, num_rows, NUM_OUTPUTS, BOX_N, BLOCK_M, num_warps)


def skinny_linear(
    x: Tensor, weight: Tensor, tiles: Tiles, output: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [T, K], bfloat16, contiguous, T <= 128.
        weight: [N, K], bfloat16, contiguous.
        tiles: From skinny_linear_tiles.py.
        output: [T, N], float32 or bfloat16; default: a new bfloat16 tensor.
        bias: [N], added to the float32 sums; None: 0.

    Returns:
        [T, N].
    """
    output = x.new_empty(len(x), len(weight)) if output is None else output
    return _launch(x, weight, tiles, output, bias, is_gated=False)


def gated_skinny_linear(x: Tensor, weight: Tensor, tiles: Tiles, bias: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, [T, N], where gate and up are the two halves of weight [2 * N, K] and bias [2 * N]."""
    return _launch(x, weight, tiles, x.new_empty(len(x), len(weight) // 2), bias, is_gated=True)


def _launch(x: Tensor, weight: Tensor, tiles: Tiles, output: Tensor, bias: Tensor | None, is_gated: bool) -> Tensor:
    num_rows, num_inputs = x.shape
    boxes = 2 if is_gated else 1
    num_outputs, box_n = len(weight) // boxes, tiles.block_n // boxes
    assert num_rows <= MAX_ROWS and x.dtype == weight.dtype == torch.bfloat16
    assert weight.shape[1] == num_inputs and x.is_contiguous() and weight.is_contiguous()
    assert num_outputs % box_n == 0 and num_inputs % tiles.block_k == 0
    assert output.shape == (num_rows, num_outputs) and output.is_contiguous()
    assert bias is None or (bias.shape == (len(weight),) and bias.is_contiguous())
    if num_rows == 0:
        return output
    block_m = max(8, triton.next_power_of_2(triton.cdiv(num_rows, tiles.row_blocks)))  # wgmma has no fewer columns
    stage_bytes = (tiles.block_n + block_m) * tiles.block_k * 2
    num_shares = min(num_outputs // box_n, NUM_SMS // tiles.row_blocks)
    skinny_linear_kernel[(num_shares * tiles.row_blocks,)](
        _descriptor(weight, box_n, tiles.block_k),
        _descriptor(x, block_m, tiles.block_k),
        output,
        bias,
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        GATED=is_gated,
        BLOCK_N=tiles.block_n,
        BLOCK_M=block_m,
        BLOCK_K=tiles.block_k,
        NUM_STAGES=(_SHARED_BYTES - output.element_size() * box_n * block_m) // stage_bytes,
        ROW_BLOCKS=tiles.row_blocks,
        NUM_SHARES=num_shares,
        num_warps=tiles.num_warps,
        launch_pdl=True,
    )
    return output


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, columns], _layout(rows, columns))


@cache
def _layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
