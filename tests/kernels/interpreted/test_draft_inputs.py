"""The Triton kernels of the inputs of drafts against their references, and these against a step computed by hand."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kernels.draft_inputs_reference import (
    DraftPlaces,
    LastDrafts,
    SampledStep,
    begin_drafts_reference,
    place_drafts_reference,
)
from kernels.draft_inputs_triton import begin_drafts_triton, place_drafts_triton

UNWRITTEN, BLOCK_SIZE = -77, 4


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def step() -> SampledStep:
    """Return a step of four sequences and padding.

    One has three drafts, of which the first is right. The others are a chunk, the end of a prompt, and a decode.
    """
    return SampledStep(
        token_ids=int64(50, 51, 59, 53, 60, 61, 70, 71, 72, 80, 0),
        positions=int64(8, 9, 10, 11, 0, 1, 4, 5, 6, 2, 0),
        query_start_loc=int32(0, 1, 2, 3, 4, 6, 9, 10, 11),
        logits_indices=int64(0, 1, 2, 3, 8, 9),
        sampled=int64(51, 52, 53, 54, 73, 81),
        following=int32(-1, -2, -3, -4, 62, -5, -6, 0),
        first_samples=int32(0, 4, 5, 0),
        last_samples=int32(3, 4, 5, -1),
    )


def places(num_sequences: int = 4, num_groups: int = 2) -> DraftPlaces:
    def unwritten(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(size, UNWRITTEN, dtype=dtype)

    tables = torch.arange(10, 10 + num_groups * num_sequences * 4, dtype=torch.int32)
    return DraftPlaces(
        kept_rows=unwritten(num_sequences),
        kept_positions=unwritten(num_sequences, dtype=torch.int32),
        positions=unwritten(num_sequences),
        seq_lens=unwritten(num_sequences, dtype=torch.int32),
        slot_mapping=unwritten(num_groups, num_sequences),
        block_tables=tables.view(num_groups, num_sequences, 4),
    )


def last_drafts(num_tokens: int, places: DraftPlaces) -> LastDrafts:
    return LastDrafts(
        next_token_ids=torch.full((num_tokens,), UNWRITTEN),
        kept_rows=places.kept_rows,
        kept_positions=places.kept_positions,
        drafts=torch.zeros(3, len(places.kept_rows), dtype=torch.int64),
        lookahead=2,
    )


def test_reference_keeps_right_drafts_and_shifts_tokens() -> None:
    written = last_drafts(11, places())
    begin_drafts_reference(step(), written)
    assert written.next_token_ids.tolist() == [51, 52, 53, 54, 61, 62, 71, 72, 73, 81, 0]
    # 51 was drawn as drafted; then 52, not 59. The draft 53 after it equals its sample, which counts no more.
    assert written.kept_rows.tolist() == [1, 8, 9, 0]
    assert written.kept_positions.tolist() == [9, 6, 2, -1]


def test_reference_places_drafts_after_kept_rows() -> None:
    written = places()
    written.kept_positions.copy_(int32(9, 6, 14, -1))
    place_drafts_reference(written, 2, max_len=16, block_size=BLOCK_SIZE)
    assert written.positions.tolist() == [11, 8, 15, 0]  # the last one stays below the longest sequence
    assert written.seq_lens.tolist() == [12, 9, 16, 0]
    tables = written.block_tables[0]
    assert written.slot_mapping[0].tolist() == [
        tables[0, 2] * 4 + 3, tables[1, 2] * 4, tables[2, 3] * 4 + 3, 0,
    ]  # fmt: skip


def assert_equal(first: DraftPlaces, second: DraftPlaces) -> None:
    for field in fields(DraftPlaces):
        torch.testing.assert_close(getattr(first, field.name), getattr(second, field.name), msg=field.name)


def random_step(generator: torch.Generator) -> tuple[SampledStep, int]:
    """Return a step of decodes with 0 to 7 drafts and of prompts, and the number of its sequences."""

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    lens: list[int] = []
    samples: list[int] = []
    following, firsts, lasts = [], [], []
    for _ in range(1 + number(12)):
        if number(3):
            num_drafts = number(8)
            firsts.append(len(samples))
            for _ in range(1 + num_drafts):
                following.append(-1 - len(samples))
                samples.append(sum(lens))
                lens.append(1)
            lasts.append(len(samples) - 1)
        else:
            lens.append(1 + number(600))
            following.append(number(9))
    num_tokens = sum(lens)
    return SampledStep(
        token_ids=torch.randint(3, (num_tokens,), generator=generator),  # of three tokens, so many drafts are right
        positions=torch.randint(900, (num_tokens,), generator=generator),
        query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
        logits_indices=torch.tensor([*samples, 0]),
        sampled=torch.randint(3, (len(samples) + 1,), generator=generator),
        following=int32(*following),
        first_samples=int32(*firsts, 0),
        last_samples=int32(*lasts, -1),
    ), len(firsts) + 1


@pytest.mark.parametrize("seed", range(20))
def test_triton_equals_the_references(seed: int) -> None:
    one, num_sequences = random_step(torch.Generator().manual_seed(seed))
    expected, written = places(num_sequences), places(num_sequences)
    lasts = [last_drafts(len(one.token_ids), these) for these in (expected, written)]
    begin_drafts_reference(one, lasts[0])
    begin_drafts_triton(one, lasts[1])
    assert lasts[0].next_token_ids.tolist() == lasts[1].next_token_ids.tolist()
    assert_equal(written, expected)
    for these in (expected, written):
        these.kept_positions.clamp_(max=13)
    for number in (1, 3):
        place_drafts_reference(expected, number, 16, BLOCK_SIZE)
        place_drafts_triton(written, number, 16, BLOCK_SIZE)
        assert_equal(written, expected)
