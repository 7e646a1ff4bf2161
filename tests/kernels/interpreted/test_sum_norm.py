"""Row sums over ranks fused with the residual addition and the norm; all ranks' buffers are in this process.

A launch of the interpreter ends before the next one starts, so no rank can wait. Every rank first sends without
waiting, and its counts are reset; when it sends again beside the parts of all others, its sums are complete. Uses
float16, since the interpreter rounds bfloat16 differently from a GPU.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm_quantized, add_rms_norm_triton
from kernels.sum_norm import (
    MAX_ROWS,
    ROW_ELEMENTS,
    RowExchange,
    max_rows,
    memory_elements,
    sum_add_rms_norm,
    sum_add_rms_norm_quantized,
)

EPS = 1e-5


def exchanges(size: int) -> list[RowExchange]:
    memories = [torch.zeros(memory_elements(size), dtype=torch.int16) for _ in range(size)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    rows = max_rows(size)
    return [
        RowExchange(rank, memories[rank], addresses, torch.zeros(rows, dtype=torch.int32), max_spins=1)
        for rank in range(size)
    ]


def random(num_rows: int, hidden: int, seed: int) -> Tensor:
    """Return strided rows; the columns after a row must not be read."""
    rows = torch.randn(num_rows, hidden + 16, generator=torch.Generator().manual_seed(seed)).to(torch.float16)
    rows[:, hidden:] = torch.nan
    return rows[:, :hidden]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(torch.float16)


def send(ranks: list[RowExchange], parts: list[Tensor], weight: Tensor) -> None:
    for rank, part in zip(ranks, parts, strict=True):
        sum_add_rms_norm(part, part, weight, EPS, replace(rank, max_spins=0))
        rank.counts[: len(part)] -= 1


@pytest.mark.parametrize(("size", "num_rows", "hidden"), [(2, 3, 4096), (2, 1, 100), (3, 2, 576), (4, 5, 128)])
def test_every_rank_has_the_bits_of_sum_then_norm(size: int, num_rows: int, hidden: int) -> None:
    ranks, weight = exchanges(size), random(1, hidden, 99)[0].contiguous()
    for round_number in range(5):  # both slots, each reused
        rows = num_rows if round_number != 2 else 1  # another number of rows in between
        parts = [random(rows, hidden, 10 * round_number + rank) for rank in range(size)]
        residual = random(rows, hidden, 1000 + round_number)
        send(ranks, parts, weight)
        expected, new_residual = add_rms_norm_triton(in_order(parts), residual, weight, EPS)
        for rank, part in zip(ranks, parts, strict=True):
            normed, added = sum_add_rms_norm(part, residual, weight, EPS, rank)
            assert torch.equal(normed, expected) and torch.equal(added, new_residual)
    assert ranks[0].counts[:2].tolist() == [5, 4 if num_rows > 1 else 0]


def test_rows_of_another_width_do_not_interfere() -> None:
    ranks = exchanges(2)
    for hidden, rows in ((256, 4), (1024, 2), (64, 3), (256, 4)):
        parts, weight = [random(rows, hidden, hidden + rank) for rank in range(2)], torch.ones(hidden)
        send(ranks, parts, weight)
        for rank, part in zip(ranks, parts, strict=True):
            _, added = sum_add_rms_norm(part, torch.zeros_like(part), weight, EPS, rank)
            assert torch.equal(added, in_order(parts))


@pytest.mark.parametrize("is_grouped", [False, True])
def test_quantized_sum_norm_equals_sum_then_quantized_norm(is_grouped: bool) -> None:
    ranks, weight = exchanges(2), torch.ones(384)
    parts, residual = [random(2, 384, rank) for rank in range(2)], random(2, 384, 7)
    send(ranks, parts, weight)
    normed, _ = add_rms_norm_triton(in_order(parts), residual, weight, EPS)
    expected, new_residual = add_rms_norm_quantized(in_order(parts), residual, weight, EPS, is_grouped)
    for rank, part in zip(ranks, parts, strict=True):
        found, added = sum_add_rms_norm_quantized(part, residual, weight, EPS, rank, is_grouped, keeps_plain=True)
        assert found.plain is not None and torch.equal(found.plain, normed)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.scales, expected.scales) and torch.equal(added, new_residual)


def test_arrival_counts_wrap_around() -> None:
    ranks, weight = exchanges(2), torch.ones(64)
    for rank in ranks:
        rank.counts.fill_(2**31 - 2)
        rank.own[-2 * 2 * max_rows(2) :].view(torch.int32).fill_(2**31 - 2)
    for number in range(4):
        parts = [random(1, 64, 5 * number + rank) for rank in range(2)]
        send(ranks, parts, weight)
        for rank, part in zip(ranks, parts, strict=True):
            _, added = sum_add_rms_norm(part, torch.zeros_like(part), weight, EPS, rank)
            assert torch.equal(added, in_order(parts))


def test_missing_rank_times_out_when_a_limit_is_set() -> None:
    first, _ = exchanges(2)
    part = random(1, 64, 0)
    _, added = sum_add_rms_norm(part, torch.zeros_like(part), torch.ones(64), EPS, replace(first, max_spins=3))
    assert torch.equal(added, part)  # from an unwritten slot


def test_too_many_or_too_wide_rows_are_refused() -> None:
    first, _ = exchanges(2)
    for rows, hidden in ((MAX_ROWS + 1, 64), (1, ROW_ELEMENTS + 1), (0, 64)):
        part = torch.zeros(rows, hidden, dtype=torch.float16)
        with pytest.raises(AssertionError):
            sum_add_rms_norm(part, part, torch.ones(hidden), EPS, first)
    assert max_rows(8) == 36
