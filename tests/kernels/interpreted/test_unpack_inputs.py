"""The Triton unpacking of a batch against its reference, and the reference against a batch computed by hand."""

import pytest
import torch

from kernels.draft_inputs_reference import LastDrafts
from kernels.unpack_inputs import DescribedBatch, InputTensors, unpack_inputs_reference, unpack_inputs_triton

UNWRITTEN = -77
BLOCK_SIZE = 4


def int32(*values: int | tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch() -> tuple[DescribedBatch, torch.Tensor]:
    """Return a decode with a token in flight, a 9-token prompt's end, a decode, and a chunk that samples nothing."""
    described = DescribedBatch(
        query_start_loc=int32(0, 1, 6, 7, 10),
        seq_lens=int32(8, 9, 3, 3),
        feedback=int32(1, -1, -1, -1),
        token_ids=int32(0, 50, 51, 52, 53, 54, 60, 70, 71, 72),
        block_tables=int32(
            *((5, 6, 0), (7, 8, 9), (3, 99, 99), (4, 99, 99)), *((15, 16, 0), (0, 18, 19), (13, 99, 99), (14, 99, 99))
        ).ravel(),
        logits_indices=int32(0, 5, 6),
        num_sequences=4,
        num_tokens=10,
        num_logits=3,
        row_stride=3,
    )
    return described, torch.tensor([30, 31], dtype=torch.int64)


def inputs(num_rows: int = 16, num_tokens: int = 16, num_groups: int = 2, *, has_states: bool = False) -> InputTensors:
    def unwritten(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(size, UNWRITTEN, dtype=dtype)

    return InputTensors(
        unwritten(num_tokens),
        unwritten(num_tokens),
        unwritten(num_groups, num_tokens),
        unwritten(num_rows + 1, dtype=torch.int32),
        unwritten(num_rows, dtype=torch.int32),
        unwritten(num_groups, num_rows, 5, dtype=torch.int32),
        unwritten(num_rows),
        unwritten(num_tokens),
        unwritten(3, num_rows + 1, dtype=torch.int32) if has_states else None,
    )


def test_unpack_reference_of_a_mixed_padded_batch() -> None:
    described, sampled = batch()
    written = inputs()
    unpack_inputs_reference(described, sampled, written, 12, BLOCK_SIZE)
    u = UNWRITTEN
    assert written.token_ids.tolist() == [31, 50, 51, 52, 53, 54, 60, 70, 71, 72, 0, 0, u, u, u, u]
    assert written.positions.tolist() == [7, 4, 5, 6, 7, 8, 2, 0, 1, 2, 0, 0, u, u, u, u]
    assert written.slot_mapping[0].tolist() == [27, 32, 33, 34, 35, 36, 14, 16, 17, 18, 0, 0, u, u, u, u]
    assert written.slot_mapping[1].tolist() == [67, 72, 73, 74, 75, 76, 54, 56, 57, 58, 0, 0, u, u, u, u]
    # Two padding rows have the two padding tokens, and the last six have none.
    assert written.query_start_loc.tolist() == [0, 1, 6, 7, 10, 11, 12, 12, 12, 12, 12, 12, 12, u, u, u, u]
    assert written.seq_lens.tolist() == [8, 9, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, u, u, u, u]
    first, second = written.block_tables[:, :4].tolist()
    assert first == [[5, 6, u, u, u], [7, 8, 9, u, u], [3, u, u, u, u], [4, u, u, u, u]]
    assert second == [[15, 16, u, u, u], [0, 18, 19, u, u], [13, u, u, u, u], [14, u, u, u, u]]
    assert written.logits_indices.tolist() == [0, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, u, u, u, u]


def test_unpack_reference_without_padding() -> None:
    described, sampled = batch()
    written = inputs()
    unpack_inputs_reference(described, sampled, written, None, BLOCK_SIZE)
    assert written.token_ids.tolist() == [31, 50, 51, 52, 53, 54, 60, 70, 71, 72, *[UNWRITTEN] * 6]
    assert written.query_start_loc.tolist() == [0, 1, 6, 7, 10, *[UNWRITTEN] * 12]
    assert written.logits_indices.tolist() == [0, 5, 6, 0, *[UNWRITTEN] * 12]


def test_unpack_reference_with_padded_logit_rows() -> None:
    described, sampled = batch()
    written = inputs()
    unpack_inputs_reference(described, sampled, written, None, BLOCK_SIZE, num_logit_rows=8)
    assert written.logits_indices.tolist() == [0, 5, 6, 0, 0, 0, 0, 0, *[UNWRITTEN] * 8]


def assert_kernel_equals_reference(
    described: DescribedBatch,
    sampled: torch.Tensor,
    size: int | None,
    block_size: int,
    num_tokens: int,
    num_logit_rows: int = 0,
    last: LastDrafts | None = None,
) -> None:
    num_groups = len(described.block_tables) // (described.num_sequences * described.row_stride)
    has_states = described.drafted_states is not None
    expected, written = (inputs(num_tokens=num_tokens, num_groups=num_groups, has_states=has_states) for _ in range(2))
    unpack_inputs_reference(described, sampled, expected, size, block_size, num_logit_rows, last)
    unpack_inputs_triton(described, sampled, written, size, block_size, num_logit_rows, last)
    for name in InputTensors.__annotations__:
        assert name == "drafted_states" or torch.equal(getattr(written, name), getattr(expected, name)), name
    if written.drafted_states is not None and expected.drafted_states is not None:
        assert torch.equal(written.drafted_states, expected.drafted_states)


@pytest.mark.parametrize("size", [None, 10, 11, 16])
def test_unpack_of_a_mixed_batch_equals_the_reference(size: int | None) -> None:
    assert_kernel_equals_reference(*batch(), size, BLOCK_SIZE, num_tokens=16)
    assert_kernel_equals_reference(*batch(), size, BLOCK_SIZE, num_tokens=16, num_logit_rows=14)


def drafted() -> tuple[DescribedBatch, torch.Tensor, LastDrafts]:
    """Return a step after one that drafted for two sequences; of the first, two of three drafts were wrong."""
    described = DescribedBatch(
        query_start_loc=int32(0, 1, 2, 3, 4, 6),
        seq_lens=int32(9, 10, 11, 4, 2),
        feedback=int32(-2, -3, -4, -10, -1),  # a token and two drafts of sequence 0, the token of sequence 1
        token_ids=int32(0, 0, 0, 0, 50, 51),
        block_tables=int32(*(1, 2, 3, 0), *(1, 2, 3, 0), *(1, 2, 3, 0), *(4, 5, 0, 0), *(6, 0, 0, 0)),
        logits_indices=int32(0, 1, 2, 3, 5),
        num_sequences=5,
        num_tokens=6,
        num_logits=5,
        row_stride=4,
        # The last column is not of this step.
        drafted_states=int32(0, 0, 3, 4, 6, 9, 0, 0, 4, 2, 0, 9, 0, 0, 4, 3, 2, 9).view(3, 6),
    )
    last = LastDrafts(
        next_token_ids=torch.tensor([70, 71, 72, 73, 80]),
        kept_rows=torch.tensor([1, 4]),
        kept_positions=int32(5, 2),
        drafts=torch.tensor([[90, 95], [91, 96], [92, 97]]),
        lookahead=2,
    )
    return described, torch.zeros(1, dtype=torch.int64), last


def test_rows_of_drafts_follow_what_stands() -> None:
    described, sampled, last = drafted()
    written = inputs(num_groups=1, has_states=True)
    unpack_inputs_reference(described, sampled, written, None, BLOCK_SIZE, last=last)
    assert written.token_ids.tolist()[:6] == [71, 90, 91, 80, 50, 51]
    assert written.positions.tolist()[:6] == [6, 7, 8, 3, 0, 1]
    assert written.lowered.tolist()[:6] == [2, 2, 2, 0, 0, 0]
    assert written.seq_lens.tolist()[:5] == [7, 8, 9, 4, 2]
    assert written.slot_mapping[0].tolist()[:6] == [10, 11, 12, 19, 24, 25]
    assert written.drafted_states is not None
    starts, pending, kept = written.drafted_states.tolist()
    assert starts[1:6] == [0, 0, 3, 4, 6]
    assert pending[:5] == [0, 0, 2, 2, 0] and kept[:5] == [0, 0, 2, 3, 2]  # two of the four pending tokens were wrong
    # The blocks of the head's later passes are there too.
    assert written.block_tables[0, 2].tolist()[:4] == [1, 2, 3, 0] and written.block_tables[0, 3, :2].tolist() == [4, 5]


@pytest.mark.parametrize("size", [None, 8])
def test_unpack_of_drafts_equals_the_reference(size: int | None) -> None:
    described, sampled, last = drafted()
    assert_kernel_equals_reference(described, sampled, size, BLOCK_SIZE, num_tokens=16, last=last)


@pytest.mark.parametrize("size", [None, 2, 4])
def test_more_wanted_logits_than_rows_are_unpacked(size: int | None) -> None:
    described = DescribedBatch(
        query_start_loc=int32(0, 2),
        seq_lens=int32(2),
        feedback=int32(-1),
        token_ids=int32(8, 9),
        block_tables=int32(3),
        logits_indices=int32(1, 1, 1),
        num_sequences=1,
        num_tokens=2,
        num_logits=3,
        row_stride=1,
    )
    assert_kernel_equals_reference(described, torch.zeros(1, dtype=torch.int64), size, BLOCK_SIZE, num_tokens=16)
    written = inputs(num_groups=1)
    unpack_inputs_reference(described, torch.zeros(1, dtype=torch.int64), written, size, BLOCK_SIZE)
    assert written.logits_indices.tolist()[:4] == [1, 1, 1, 0 if size == 4 else UNWRITTEN]


def test_chunk_longer_than_one_program_is_unpacked() -> None:
    described = DescribedBatch(
        query_start_loc=int32(0, 2500),
        seq_lens=int32(2503),
        feedback=int32(-1),
        token_ids=torch.arange(2500, dtype=torch.int32),
        block_tables=int32(*range(40, 45)),
        logits_indices=int32(2499),
        num_sequences=1,
        num_tokens=2500,
        num_logits=1,
        row_stride=5,
    )
    assert_kernel_equals_reference(described, torch.zeros(1, dtype=torch.int64), None, 512, num_tokens=2500)
