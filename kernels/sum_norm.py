"""All-reduce of rows across GPUs, residual addition and RMSNorm in one launch per GPU.

Parts are added in rank order in float32 and rounded to their dtype; from there the result equals add_rms_norm()
(rms_norm.py) bit for bit. As in all_reduce.py, a buffer has two slots used in turn, exchanges are counted on the
device, and all GPUs make the same launches in the same order. A row's location depends neither on the number nor on
the width of rows. engine_worker/model/peer_norm.py maps the memory.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.rms_norm import store_normed_row
from kernels.scaled import GROUP, Scaled, empty_rows

ROW_ELEMENTS = 8192  # maximum width of a row
MAX_ROWS = 256  # two ranks: 512 threads per row and two rows per SM, because all programs must be resident at once
PROGRAMS_PER_SM = 2  # for every width: this limits a thread to 64 registers
UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Memory that all ranks can write; zeros on all GPUs before first use."""

    rank: int
    own: Tensor  # [memory_elements(size)] int16, written by the other ranks in the rows' dtype
    buffers: Tensor  # [size] int64: address of each rank's `own` as seen by this GPU
    counts: Tensor  # [max_rows(size)] int32, local: number of exchanges so far per row
    max_spins: int = UNLIMITED  # limit of the wait for a rank, after which sums are wrong; used to test connectivity

    @property
    def size(self) -> int:
        return len(self.buffers)


def max_rows(size: int) -> int:
    """Return the maximum number of rows of an exchange between `size` ranks; each row is sent to all others."""
    return MAX_ROWS // (size - 1)


def memory_elements(size: int) -> int:
    """Return the 16-bit elements of `own`: two slots with rows of every rank, then an int32 per rank and row."""
    return size * max_rows(size) * (2 * ROW_ELEMENTS + 2)


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
    tl.debug_barrier()  # all threads must store before one thread releases the flags
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flags = (tl.load(buffers + rank).to(tl.pointer_type(DTYPE)) + FLAGS).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * ROWS + row, count, sem="release", scope="sys")


@triton.jit
def _wait(flags, row, count, max_spins, RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Wait until every other rank has released its flag here."""
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            # A rank may be one exchange ahead. The difference stays correct when the counts wrap around.
            spins = 0
            while (tl.atomic_add(flags + rank * ROWS + row, 0, sem="acquire", scope="sys") - count < 0) & (
                spins < max_spins
            ):
                spins += 1
    tl.debug_barrier()


@triton.jit
def _part_of(
    rank: tl.constexpr, mine, rows, columns, inside,
    RANK: tl.constexpr, ROWS: tl.constexpr, ROW_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Return a rank's part; `rows` points to the first rank's row in the current slot."""
    if rank == RANK:
        part = mine
    else:
        place = rows + rank * ROWS * ROW_ELEMENTS + columns
        part = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")  # L1 may hold stale values
    return part.to(tl.float32)


# One compiled kernel serves both the connectivity test with few spins and production.
@triton.jit(do_not_specialize=["max_spins"])
def _sum_norm_kernel(
    part, residual, weight, normed, new_residual, scales, plain, own, buffers, counts,
    part_row_stride, residual_row_stride, eps, max_spins,
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
    _wait((own + FLAGS).to(tl.pointer_type(tl.int32)), row, count, max_spins, RANK, SIZE, ROWS)
    tl.store(counts + row, count)
    rows = own.to(tl.pointer_type(DTYPE)) + (slot + row) * ROW_ELEMENTS
    total = _part_of(0, mine, rows, columns, inside, RANK, ROWS, ROW_ELEMENTS)
    for rank in tl.static_range(1, SIZE):
        total += _part_of(rank, mine, rows, columns, inside, RANK, ROWS, ROW_ELEMENTS)
    rounded = (total.to(DTYPE).to(tl.float32) + before).to(DTYPE)
    tl.store(new_residual + wide_row * HIDDEN + columns, rounded, mask=inside)
    store_normed_row(
        rounded.to(tl.float32), weight_row, normed, scales, plain, wide_row, eps, HIDDEN, BLOCK, GROUP, DTYPE
    )


def sum_add_rms_norm(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: RowExchange
) -> tuple[Tensor, Tensor]:
    """Sum the ranks' parts, add the residual and norm.

    Args:
        part: [T, H], 16-bit, this rank's part; rows may be strided, not modified.
        residual: [T, H], dtype of part; rows may be strided, not modified.
        weight: [H].
        eps: Added to the mean square.
        exchange: The memory shared with the other ranks.

    Returns:
        (normed [T, H], sum + residual [T, H]).
    """
    normed, new_residual = part.new_empty(part.shape), part.new_empty(part.shape)
    _launch(part, residual, weight, eps, exchange, normed, new_residual)
    return normed, new_residual


def sum_add_rms_norm_quantized(
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    exchange: RowExchange,
    is_grouped: bool,
    keeps_plain: bool = False,
) -> tuple[Scaled, Tensor]:
    """Compute sum_add_rms_norm() and quantize the norm by rows, or by groups of 128 elements if `is_grouped`."""
    hidden = part.shape[1]
    assert not is_grouped or hidden % GROUP == 0
    new_residual = part.new_empty(part.shape)
    normed = empty_rows(part, hidden, is_grouped, keeps_plain)
    group = GROUP if is_grouped else triton.next_power_of_2(hidden)
    _launch(part, residual, weight, eps, exchange, normed.values, new_residual, normed, group)
    return normed, new_residual


def _launch(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, exchange: RowExchange, normed: Tensor,
    new_residual: Tensor, rows: Scaled | None = None, group: int = 0,
) -> None:  # fmt: skip
    num_rows, hidden = part.shape
    assert part.dtype == residual.dtype and part.dtype.itemsize == 2 and residual.shape == part.shape
    assert part.stride(1) == residual.stride(1) == 1 and weight.shape == (hidden,) and weight.is_contiguous()
    assert 0 < num_rows <= max_rows(exchange.size) and hidden <= ROW_ELEMENTS
    block = triton.next_power_of_2(hidden)
    _sum_norm_kernel[(num_rows,)](
        part,
        residual,
        weight,
        normed,
        new_residual,
        None if rows is None else rows.scales,
        None if rows is None else rows.plain,
        exchange.own,
        exchange.buffers,
        exchange.counts,
        part.stride(0),
        residual.stride(0),
        eps,
        exchange.max_spins,
        HIDDEN=hidden,
        BLOCK=block,
        GROUP=group,
        RANK=exchange.rank,
        SIZE=exchange.size,
        ROWS=max_rows(exchange.size),
        ROW_ELEMENTS=ROW_ELEMENTS,
        num_warps=min(16, max(1, block // 256)),  # as in rms_norm.py
        **dependent_launch(part),
    )
