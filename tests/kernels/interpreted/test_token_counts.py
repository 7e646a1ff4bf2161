"""The Triton token counts and penalties against their references, bit for bit."""

import pytest
import torch

from kernels.sampling import token_counts_triton as kernels
from kernels.sampling.token_counts import new_counts
from kernels.sampling.token_counts_reference import (
    MAX_COUNT,
    apply_penalties_reference,
    count_drawn_reference,
    recount_reference,
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a row, several chunks a span and several blocks of drawn tokens."""
    monkeypatch.setattr(kernels, "_LANES", 16)
    monkeypatch.setattr(kernels, "_DRAWN_BLOCK", 2)
    monkeypatch.setattr(kernels, "_BLOCK", 32)


def counted(vocab_size: int, spans: list[list[int]], token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts of the reference and of the kernel, in every second row."""
    rows = torch.arange(len(spans), dtype=torch.int32) * 2
    both = []
    for count in (recount_reference, kernels.recount_triton):
        counts = new_counts(2 * len(spans), vocab_size, torch.device("cpu")).fill_(77)
        count(counts, rows, token_ids, torch.tensor(spans, dtype=torch.int32))
        both.append(counts)
    return both[0], both[1]


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 101])
def test_recount_equals_the_reference(vocab_size: int) -> None:
    token_ids = torch.randint(vocab_size, (200,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    expected, found = counted(vocab_size, [[0, 50, 50, 120], [0, 50, 120, 120], [7, 7, 7, 200]], token_ids)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("token_id", [4, 5])
def test_recount_stops_at_the_greatest_count(token_id: int) -> None:
    """The neighbor in the same word keeps its count."""
    token_ids = torch.full((MAX_COUNT + 40,), token_id, dtype=torch.int32)
    token_ids[[1, 2, 3]] = token_id ^ 1
    token_ids = torch.cat((token_ids, token_ids.new_tensor([token_id])))
    end = len(token_ids)
    for kernel_lanes in (256, 1024):
        kernels._LANES = kernel_lanes
        expected, found = counted(8, [[end - 1, end, 0, end]], token_ids)
        assert torch.equal(found, expected)
    assert expected[0, [token_id, token_id ^ 1]].tolist() == [-1, 3]


def test_drawn_tokens_are_counted_up_to_the_greatest_count() -> None:
    expected = torch.zeros(4, 8, dtype=torch.int16)
    expected[0, 3], expected[1, 3], expected[2, 3] = MAX_COUNT, -1, -(2**15)  # full, full in a prompt, in a prompt
    found = expected.clone()
    rows, score_rows = torch.tensor([2, 1, 0], dtype=torch.int32), torch.tensor([0, 3, 1], dtype=torch.int32)
    token_ids = torch.tensor([3, 3, 5, 3])
    count_drawn_reference(expected, rows, score_rows, token_ids)
    kernels.count_drawn_triton(found, rows, score_rows, token_ids)
    assert torch.equal(found, expected)
    assert found[:3, 3].tolist() == [MAX_COUNT, -1, -(2**15) + 1]


@pytest.mark.parametrize("vocab_size", [1, 33, 300])
def test_penalties_equal_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(5, vocab_size, generator=generator)
    scores[0, 0], scores[2, 0] = -torch.inf, torch.nan
    counts = torch.randint(-(2**15), 2**15, (6, -(-vocab_size // 8) * 8), dtype=torch.int16, generator=generator)
    counts[:, ::3] = 0
    counts[3, :] %= 4
    score_rows, rows = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([1, 5, 3], dtype=torch.int32)
    penalties = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.1, -0.7], [0.9, -0.25, 1.1]])
    expected, found = scores.clone(), scores.clone()
    apply_penalties_reference(expected, score_rows, counts, rows, penalties)
    kernels.apply_penalties_triton(found, score_rows, counts, rows, penalties)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found[[1, 3]], scores[[1, 3]])
