"""The sum of the rows of several GPUs, added to the residual and normed, in one launch on each of them.

    RowExchange(rank, own, buffers, counts)       memory that all reach, see below; memory_elements(size) says how much
    sum_add_rms_norm(part, residual, weight, eps, exchange)   [T, H] of 16 bits  -> (normed [T, H], new_residual [T, H])
    sum_add_rms_norm_quantized(..., is_grouped)                                  -> (normed as Scaled, new_residual)

Row by row: store the part in every other rank's buffer, release a flag there, wait for the flags of all, add the parts
in the order of the ranks in float32, round to their type. From there on it is add_rms_norm() (rms_norm.py), bit by bit:
who sums two ranks by other means and norms then has the same. As in all_reduce.py a buffer has two slots that take
turns, what is counted is counted on the device, and launches are the same on all GPUs, in the same order; where a row
lies depends neither on how many there are nor on how wide they are. It knows no process: peer_norm.py maps the memory.
It is used in every step of a group of ranks, twice a layer.
"""
# Arguments of a launch are flat (ADR 0108).
# ruff: noqa: PLR0913, PLR0917

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.rms_norm import store_normed_row
from kernels.scaled import GROUP, Scaled, empty_rows

ROW_ELEMENTS = 8192  # the widest row
MOST_ROWS = 256  # of two ranks: 512 threads each, two on each of 132 multiprocessors, as each waits for its twins
PROGRAMS_PER_SM = 2  # whatever the width: 64 registers a thread are the most that it may take
UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Zeros at the start, on all GPUs, before any uses them."""

    rank: int
    own: Tensor  # [memory_elements(size)] int16, which the others write: rows of whichever type
    buffers: Tensor  # [size] int64: the addresses of `own` of every rank, as this GPU reaches them
    counts: Tensor  # [most_rows(size)] int32, of this GPU alone: exchanges of each row so far
    most_spins: int = UNLIMITED  # that a rank is waited for; then sums are wrong. For who tries whether they come

    @property
    def size(self) -> int:
        return len(self.buffers)


def most_rows(size: int) -> int:
    """That an exchange of `size` ranks takes: each sends a row to all others."""
    return MOST_ROWS // (size - 1)


def memory_elements(size: int) -> int:
    """Return how many of 16 bits: two slots with rows of every rank, then an int32 for each rank and row."""
    return size * most_rows(size) * (2 * ROW_ELEMENTS + 2)


@triton.jit
def _send(
    mine, buffers, slot, row, columns, inside, count,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, ROW_ELEMENTS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Store the row in every other rank's slot, then release its flag there."""
    DTYPE: tl.constexpr = mine.dtype
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(DTYPE)), 16)
            tl.store(theirs + (slot + RANK * ROWS + row) * ROW_ELEMENTS + columns, mine, mask=inside)
    tl.debug_barrier()  # the stores of all threads come before the flags that one of them releases
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flags = (tl.load(buffers + rank).to(tl.pointer_type(DTYPE)) + FLAGS).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ROWS + row, count, sem="release", scope="sys")


@triton.jit
def _wait(flags, row, count, most_spins, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Until every other rank has released its flag here."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            # It may be one exchange ahead; the difference is right also where the counts wrap around.
            spins = 0
            while (tl.atomic_add(flags + rank * ROWS + row, 0, sem="acquire", scope="sys") - count < 0) & (
                spins < most_spins
            ):
                spins += 1
    tl.debug_barrier()


@triton.jit
def _part_of(
    rank: tl.constexpr, mine, rows, columns, inside,
    RANK: tl.constexpr, ROWS: tl.constexpr, ROW_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """`rows`: where the first rank's stands, of the slot that is summed."""
    if rank == RANK:
        part = mine
    else:
        place = rows + rank * ROWS * ROW_ELEMENTS + columns
        part = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")  # L1 may hold old ones
    return part.to(tl.float32)


# The kernel that is tried with few spins is the one that serves with any number.
@triton.jit(do_not_specialize=["most_spins"])
def _sum_norm_kernel(
    part, residual, weight, normed, new_residual, scales, own, buffers, counts,
    part_row_stride, residual_row_stride, eps, most_spins,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, ROW_ELEMENTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    DTYPE: tl.constexpr = new_residual.dtype.element_ty
    FLAGS: tl.constexpr = 2 * SIZE * ROWS * ROW_ELEMENTS
    if DEPENDENT:
        gdc_launch_dependents()
    weight_row = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    count = tl.load(counts + row) + 1
    slot = (count & 1) * (SIZE * ROWS)
    mine = tl.load(part + wide_row * part_row_stride + columns, mask=inside, other=0.0)
    _send(mine, buffers, slot, row, columns, inside, count, RANK, SIZE, ROWS, ROW_ELEMENTS, FLAGS)
    before = tl.load(residual + wide_row * residual_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    _wait((own + FLAGS).to(tl.pointer_type(tl.int32)), row, count, most_spins, RANK, SIZE, ROWS)
    tl.store(counts + row, count)
    rows = own.to(tl.pointer_type(DTYPE)) + (slot + row) * ROW_ELEMENTS
    total = _part_of(0, mine, rows, columns, inside, RANK, ROWS, ROW_ELEMENTS)
    for rank in tl.static_range(1, SIZE):
        total += _part_of(rank, mine, rows, columns, inside, RANK, ROWS, ROW_ELEMENTS)
    rounded = (total.to(DTYPE).to(tl.float32) + before).to(DTYPE)
    tl.store(new_residual + wide_row * HIDDEN + columns, rounded, mask=inside)
    store_normed_row(rounded.to(tl.float32), weight_row, normed, scales, wide_row, eps, HIDDEN, BLOCK, GROUP, DTYPE)


def sum_add_rms_norm(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: RowExchange
) -> tuple[Tensor, Tensor]:
    """Rows of `part` and `residual` may be strided; neither is modified."""
    normed, new_residual = part.new_empty(part.shape), part.new_empty(part.shape)
    _launch(part, residual, weight, eps, exchange, normed, new_residual)
    return normed, new_residual


def sum_add_rms_norm_quantized(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: RowExchange, is_grouped: bool
) -> tuple[Scaled, Tensor]:
    hidden = part.shape[1]
    assert not is_grouped or hidden % GROUP == 0
    new_residual = part.new_empty(part.shape)
    normed = empty_rows(part, hidden, is_grouped)
    group = GROUP if is_grouped else triton.next_power_of_2(hidden)
    _launch(part, residual, weight, eps, exchange, normed.values, new_residual, normed.scales, group)
    return normed, new_residual


def _launch(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: RowExchange, normed: Tensor,
    new_residual: Tensor, scales: Tensor | None = None, group: int = 0,
) -> None:  # fmt: skip
    num_rows, hidden = part.shape
    assert part.dtype == residual.dtype and part.dtype.itemsize == 2 and residual.shape == part.shape
    assert part.stride(1) == residual.stride(1) == 1 and weight.shape == (hidden,) and weight.is_contiguous()
    assert 0 < num_rows <= most_rows(exchange.size) and hidden <= ROW_ELEMENTS
    block = triton.next_power_of_2(hidden)
    _sum_norm_kernel[(num_rows,)](
        part,
        residual,
        weight,
        normed,
        new_residual,
        scales,
        exchange.own,
        exchange.buffers,
        exchange.counts,
        part.stride(0),
        residual.stride(0),
        eps,
        exchange.most_spins,
        HIDDEN=hidden,
        BLOCK=block,
        GROUP=group,
        RANK=exchange.rank,
        SIZE=exchange.size,
        ROWS=most_rows(exchange.size),
        ROW_ELEMENTS=ROW_ELEMENTS,
        num_warps=min(16, max(1, block // 256)),  # as of rms_norm.py
        **dependent_launch(part),
    )
