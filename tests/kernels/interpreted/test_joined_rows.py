"""Rows of one token that continue each other, such as drafts, are read with one pass over their keys."""

import dataclasses

import pytest
import torch

from bench.kernel.cases import (
    AttentionBatch,
    HeadShape,
    attention_batch,
    exact_attention,
    measure_error,
    with_drafts,
    with_rules,
)
from kernels.attention import decode_plan, invariant
from kernels.attention.joined_rows import join_rows
from kernels.attention.paged_attention import paged_attention_triton
from kernels.attention.score_rules import ScoreRules

# About 1e-6 from sums of a few hundred terms.
TOLERANCE = 5e-6


def batch_of(shape: HeadShape, block_size: int, lengths: list[tuple[int, int]]) -> AttentionBatch:
    """Return a batch with a row per (keys of the last token, drafts before it)."""
    ends, generator = [(keys - 1, 1) for keys, _ in lengths], torch.Generator().manual_seed(0)
    batch = attention_batch(shape, block_size, ends, torch.float32, generator)
    return with_drafts(batch, [drafts for _, drafts in lengths], generator)


def queries_of(batch: AttentionBatch, block_size: int, max_queries: int) -> list[int]:
    lengths = batch.query_start_loc, batch.seq_lens
    joined = join_rows(*lengths, batch.block_tables, block_size, max_queries).query_start_loc
    assert joined[0] == batch.query_start_loc[0] and joined[-1] == batch.query_start_loc[-1]
    return joined.diff().tolist()


def test_a_token_and_its_drafts_are_one_row() -> None:
    batch = batch_of(HeadShape(2, 1, 64), 16, [(40, 3), (41, 0), (17, 1), (19, 0)])
    assert queries_of(batch, 16, 4) == [0, 0, 0, 4, 1, 0, 2, 1]


def test_rows_are_joined_up_to_the_limit() -> None:
    batch = batch_of(HeadShape(2, 1, 64), 16, [(60, 7), (9, 4), (70, 40)])
    assert queries_of(batch, 16, 4) == [*(0, 0, 0, 4) * 2, *(0, 0, 0, 4), 1, *(0, 0, 0, 4) * 10, 1]
    assert queries_of(batch, 16, 2) == [*(0, 2) * 4, *(0, 2) * 2, 1, *(0, 2) * 20, 1]


def test_other_rows_stay_apart() -> None:
    batch = batch_of(HeadShape(2, 1, 64), 16, [(33, 0), (34, 0), (34, 1), (40, 1)])
    batch.block_tables[1, :2] = batch.block_tables[0, :2]  # a shared prefix of whole blocks, and one more token
    assert queries_of(batch, 16, 4) == [1, 1, 0, 2, 0, 2]
    batch.seq_lens[:] = 0  # padding
    assert queries_of(batch, 16, 4) == [1] * 6


def test_prompts_are_not_joined() -> None:
    batch = batch_of(HeadShape(2, 1, 64), 16, [(40, 3)])
    starts = torch.tensor([0, 2, 3, 4, 5], dtype=torch.int32)
    batch = dataclasses.replace(batch, query_start_loc=starts)
    assert queries_of(batch, 16, 4) == [2, 0, 0, 3]


LENGTHS = [(300, 3), (5, 3), (258, 1), (64, 0), (700, 2), (259, 3), (1, 0), (4, 3)]


RULES = {"plain": ScoreRules(), "window": ScoreRules(100), "softcap and sinks": ScoreRules(0, 30.0, torch.ones(12))}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("group", [3, 4, 8])
@pytest.mark.parametrize("one_kernel", [False, True])
def test_joined_rows_see_the_keys_of_their_own_tokens(one_kernel: bool, group: int, rules: ScoreRules) -> None:
    heads = HeadShape(group, 1, 64)
    batch = with_rules(batch_of(heads, 16, LENGTHS), rules)
    output = paged_attention_triton(**vars(batch), one_kernel=one_kernel, max_joined=4)
    error = measure_error(output, exact_attention(batch), TOLERANCE)
    assert error.passed, error


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("programs_per_sm", [1, 40], ids=["splits one by one", "splits side by side"])
def test_joining_changes_no_bit_of_the_one_kernel(
    programs_per_sm: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", programs_per_sm)
    lengths = [(300, 3), (66, 3), (64, 3), (130, 1), (1, 0)]
    batch = dataclasses.replace(batch_of(HeadShape(6, 2, 64), 16, lengths), rules=ScoreRules(window))
    apart = paged_attention_triton(**vars(batch), one_kernel=True)
    assert torch.equal(paged_attention_triton(**vars(batch), one_kernel=True, max_joined=4), apart)


def test_prompts_beside_joined_rows_are_computed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_COUNTED_AT_ONCE", 4)
    shape = HeadShape(4, 2, 64)
    batch = attention_batch(shape, 16, [(20, 2), (39, 1), (9, 30)], torch.float32, torch.Generator().manual_seed(0))
    rows = torch.tensor([0, 1, 1, 1, 2])
    batch = dataclasses.replace(
        batch,
        query=torch.randn(35, 4, 64, generator=torch.Generator().manual_seed(1)),
        block_tables=batch.block_tables[rows].contiguous(),
        query_start_loc=torch.tensor([0, 2, 3, 4, 5, 35], dtype=torch.int32),
        seq_lens=torch.tensor([22, 38, 39, 40, 39], dtype=torch.int32),
    )
    apart, output = (paged_attention_triton(**vars(batch), max_joined=number) for number in (1, 4))
    assert torch.equal(output[:2], apart[:2]) and torch.equal(output[5:], apart[5:])
    assert measure_error(output, exact_attention(batch), TOLERANCE).passed
