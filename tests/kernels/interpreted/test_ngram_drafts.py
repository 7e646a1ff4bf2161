"""The search for drafts on the device: the kernels against their references, and these against the search on a host."""

from random import Random

import pytest
import torch
from torch import Tensor

from engine_worker.scheduling.speculation.config import SpeculativeConfig
from engine_worker.scheduling.speculation.proposers.ngram import NgramProposer
from kernels.draft_inputs_reference import LastDrafts, SampledStep
from kernels.ngram_drafts_reference import (
    NgramLengths,
    TokenTable,
    ngram_drafts_reference,
    record_tokens_reference,
)
from kernels.ngram_drafts_triton import ngram_drafts_triton, record_tokens_triton
from tests.builders import make_sequence

NUM_DRAFTS, MAX_LEN = 3, 2100  # of more than two tiles


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def texts(seed: int) -> list[list[int]]:
    """Return texts of few different tokens, so that most ends occurred before; one has a single token."""
    random = Random(seed)
    lengths = [1, 2, 3, 40, random.randint(1000, MAX_LEN), MAX_LEN]
    return [[random.randrange(random.choice([2, 5, 40])) for _ in range(length)] for length in lengths]


def table_of(known: list[list[int]]) -> tuple[LastDrafts, TokenTable]:
    """Return a table of texts in reversed rows, and where they end; the last sequence is padding."""
    count = len(known)
    table = TokenTable(torch.full((count + 1, MAX_LEN), 7, dtype=torch.int32), int32(*range(count, -1, -1)))
    for row, text in zip(table.rows.tolist(), known, strict=False):
        table.token_ids[row, : len(text)] = int32(*text)
    kept = int32(*(len(text) - 2 for text in known), -1)
    unused = torch.zeros(1, dtype=torch.int64)
    return LastDrafts(unused, unused, kept, torch.full((NUM_DRAFTS, count + 1), -77), 0), table


@pytest.mark.parametrize("lengths", [(2, 4), (1, 1), (3, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_those_of_the_search_on_the_host(seed: int, lengths: tuple[int, int]) -> None:
    known = [text for text in texts(seed) if len(text) > 1]
    last, table = table_of(known)
    ngram_drafts_reference(last, table, NgramLengths(*lengths), last.drafts)
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=lengths[0], prompt_lookup_max=lengths[1])
    for text, drafts in zip(known, last.drafts.t().tolist(), strict=False):
        proposed = NgramProposer(config).propose(make_sequence(text), NUM_DRAFTS)
        assert drafts[: len(proposed)] == proposed
        if not proposed:
            assert drafts == [text[-1]] * NUM_DRAFTS
    assert last.drafts[:, -1].tolist() == [-77] * NUM_DRAFTS  # of padding


def test_drafts_repeat_after_the_end() -> None:
    last, table = table_of([[5, 8, 9, 8, 9]])
    ngram_drafts_reference(last, table, NgramLengths(2, 4), last.drafts)
    assert last.drafts[:, 0].tolist() == [8, 9, 8]


@pytest.mark.parametrize("lengths", [(2, 4), (1, 1), (3, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_equals_its_reference(seed: int, lengths: tuple[int, int]) -> None:
    last, table = table_of(texts(seed))
    expected, written = last.drafts.clone(), last.drafts.clone()
    ngram_drafts_reference(last, table, NgramLengths(*lengths), expected)
    ngram_drafts_triton(last, table, NgramLengths(*lengths), written)
    assert written.tolist() == expected.tolist()


def recorded() -> tuple[SampledStep, LastDrafts]:
    """Return a step of two sequences and padding.

    The first sequence has three drafts, of which one is right. The second decodes, and ends at the longest length.
    """
    step = SampledStep(
        token_ids=torch.tensor([50, 51, 59, 53, 60, 0]),
        positions=torch.tensor([8, 9, 10, 11, 15, 0]),
        query_start_loc=int32(0, 1, 2, 3, 4, 5, 6),
        logits_indices=torch.tensor([0, 1, 2, 3, 4, 0]),
        sampled=torch.tensor([51, 52, 53, 54, 61, 0]),
        following=int32(-1, -2, -3, -4, -5, 0),
        first_samples=int32(0, 4, 0),
        last_samples=int32(3, 4, -1),
    )
    next_token_ids = torch.tensor([51, 52, 53, 54, 61, 0])
    return step, LastDrafts(next_token_ids, torch.tensor([1, 4, 0]), int32(9, 15, -1), torch.zeros(3, 3), 0)


@pytest.mark.parametrize("record", [record_tokens_reference, record_tokens_triton])
def test_tokens_that_stand_are_recorded(record: object) -> None:
    step, last = recorded()
    table = TokenTable(torch.full((4, 16), 7, dtype=torch.int32), int32(2, 0, 3))
    assert callable(record)
    record(step, last, table)
    assert table.token_ids[2].tolist() == [7] * 8 + [50, 51, 52] + [7] * 5
    assert table.token_ids[0].tolist() == [7] * 15 + [60]  # there is no place for the last token
    assert set(table.token_ids[[1, 3]].flatten().tolist()) == {7}
