"""The Triton attention kernels against the float64 reference on random ragged batches.

bf16 is tested on a GPU only, since the interpreter's bf16 dot returns garbage.
"""

import dataclasses

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from bench.kernel.cases import AttentionBatch, HeadShape, attention_batch, exact_attention, measure_error
from kernels.attention import decode, decode_plan, invariant
from kernels.attention.decode_plan import plan_decode
from kernels.attention.paged_attention import paged_attention_triton

# Float32: about 1e-6 from sums of a few hundred terms. Float16: weights and output are rounded, eps / 2 each.
TOLERANCE = {torch.float32: 5e-6, torch.float16: torch.finfo(torch.float16).eps}


def build(
    shape: HeadShape, block_size: int, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> AttentionBatch:
    return attention_batch(shape, block_size, lengths, dtype, torch.Generator().manual_seed(len(lengths)))


def attend(batch: AttentionBatch) -> torch.Tensor:
    return paged_attention_triton(**vars(batch))


def assert_exact(batch: AttentionBatch, output: torch.Tensor) -> None:
    error = measure_error(output, exact_attention(batch), TOLERANCE[output.dtype])
    assert error.passed, error


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 1, 1, 2, 3, 15, 16, 17, 60])), min_size=1, max_size=4
).filter(lambda lengths: sum(new for _, new in lengths) > 0 and sum(cached + new for cached, new in lengths) > 0)


# No shrinking: at 0.3 s per example the time limit would hide the failure.
@settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
@given(
    lengths=SEQUENCES,
    block_size=st.sampled_from([8, 16, 32, 64]),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
@example(lengths=[(0, 1)], block_size=16, group=3, head_dim=64, dtype=torch.float32)
@example(lengths=[(0, 0), (63, 1), (64, 1), (0, 0)], block_size=8, group=4, head_dim=128, dtype=torch.float16)
# Tiles of 5 tokens (16 rows of 3 heads, one unused); the last tile ends at a key tile edge.
@example(lengths=[(27, 10)], block_size=16, group=3, head_dim=64, dtype=torch.float32)
@example(lengths=[(27, 10), (40, 1)], block_size=16, group=7, head_dim=64, dtype=torch.float32)
def test_ragged_batch_equals_the_reference(
    lengths: list[tuple[int, int]], block_size: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    batch = build(HeadShape(2 * group, 2, head_dim), block_size, lengths, dtype)
    assert_exact(batch, attend(batch))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 160, 256])
def test_head_dims_are_padded_to_a_tile_width(head_dim: int) -> None:
    batch = build(HeadShape(4, 2, head_dim), 16, [(70, 1), (3, 20)])
    assert_exact(batch, attend(batch))


@pytest.mark.parametrize("one_kernel", [False, True])
def test_wide_heads_in_half_precision_match_the_reference(one_kernel: bool) -> None:
    batch = build(HeadShape(4, 1, 256), 16, [(300, 1), (70, 40)], torch.float16)
    assert_exact(batch, paged_attention_triton(**vars(batch), one_kernel=one_kernel))


def test_split_decode_rows_equal_the_reference() -> None:
    # Splits of 256: just below, exactly and just above one, and three; the shortest is not split.
    batch = build(HeadShape(4, 1, 64), 16, [(254, 1), (255, 1), (256, 1), (700, 1), (10, 1)])
    assert_exact(batch, attend(batch))


def test_more_splits_than_one_join_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "MIN_SPLIT_TOKENS", 128)
    batch = build(HeadShape(2, 1, 64), 16, [(700, 1), (511, 1)])  # 6 and 4 splits; 4 are merged at a time
    batch.key_cache[batch.block_tables[0, 42]] *= 4  # a late maximum: merged results must be scaled down
    assert_exact(batch, attend(batch))


def test_splits_never_exceed_the_plan_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "MAX_SPLITS", 2)
    batch = build(HeadShape(2, 1, 64), 32, [(1299, 1), (300, 1), (511, 1), (512, 1)])
    assert_exact(batch, attend(batch))


def test_program_with_several_items_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a launch has 2 programs: one per KV head, each of which processes all sequences."""
    lengths = [(40, 1), (0, 1), (290, 1), (3, 1), (130, 1)]
    batch = build(HeadShape(4, 2, 64), 16, lengths)
    output = attend(batch)
    assert_exact(batch, output)
    monkeypatch.setattr(decode, "PROGRAMS_PER_SM", 100)  # now every item has its own program
    assert torch.equal(attend(batch), output)


def test_block_larger_than_a_key_tile_equals_the_reference() -> None:
    batch = build(HeadShape(2, 2, 64), 64, [(200, 1), (63, 1), (10, 90)])  # float32 has key tiles of 32
    assert_exact(batch, attend(batch))


@pytest.mark.parametrize(
    ("seq_len", "count", "split_tokens"),
    [(0, 1, 256), (256, 1, 256), (257, 2, 256), (2048, 8, 256), (2049, 6, 384), (8192, 11, 768), (131072, 32, 4096)],
)
def test_plan_splits_a_sequence_by_its_own_length(seq_len: int, count: int, split_tokens: int) -> None:
    lengths = torch.tensor([300, seq_len, 9], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 7], dtype=torch.int32)  # the last sequence has five new tokens: none of the plan's
    plan = plan_decode(starts, lengths, max_seq_len=131072, num_heads=2, head_dim=64)
    assert plan.sequence_items.tolist() == [[0, 2], [2, count], [2 + count, 0]]
    assert plan.num_items.tolist() == [2 + count]
    firsts = range(0, max(seq_len, 1), split_tokens)
    expected = [[1, 1, first, min(first + split_tokens, seq_len), count] for first in firsts]
    assert plan.items[2 : 2 + count, :5].tolist() == expected


def test_plan_counts_all_preceding_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "SEQUENCES_COUNTED_AT_ONCE", 4)
    lengths = torch.full((11,), 300, dtype=torch.int32)
    lengths[:3] = 1
    plan = plan_decode(torch.arange(12, dtype=torch.int32), lengths, max_seq_len=300, num_heads=1, head_dim=64)
    assert plan.num_items.tolist() == [3 + 2 * 8]
    assert plan.sequence_items.tolist() == [[0, 1], [1, 1], [2, 1], *([3 + 2 * i, 2] for i in range(8))]


def test_larger_upper_bounds_change_nothing() -> None:
    batch = build(HeadShape(4, 2, 64), 16, [(300, 1), (20, 5)])
    loose = dataclasses.replace(batch, max_query_len=64, max_seq_len=2048)
    assert torch.equal(attend(batch), attend(loose))


def test_padding_row_without_keys_gives_zero() -> None:
    batch = build(HeadShape(4, 2, 64), 16, [(40, 1), (0, 1)])
    batch.seq_lens[1] = 0
    batch.block_tables[1] = 0
    output = attend(batch)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert_exact(batch, output)


def test_rows_before_position_zero_give_zero() -> None:
    batch = build(HeadShape(4, 2, 64), 16, [(0, 5), (3, 1)])
    batch.seq_lens[0] = 2
    output = attend(batch)
    assert torch.equal(output[:3], torch.zeros_like(output[:3]))
    assert_exact(batch, output)


def test_sequence_bits_do_not_depend_on_the_batch() -> None:
    lengths = [(300, 1), (7, 37), (0, 1), (65, 20)]
    batch = build(HeadShape(6, 2, 64), 16, lengths)
    together = attend(batch)
    starts = batch.query_start_loc.tolist()
    for sequence, (cached, new) in enumerate(lengths):
        alone = dataclasses.replace(
            batch,
            query=batch.query[starts[sequence] : starts[sequence + 1]],
            block_tables=batch.block_tables[sequence : sequence + 1],
            query_start_loc=torch.tensor([0, new], dtype=torch.int32),
            seq_lens=batch.seq_lens[sequence : sequence + 1],
            max_query_len=new,
            max_seq_len=cached + new,
        )
        assert torch.equal(attend(alone), together[starts[sequence] : starts[sequence + 1]])


@pytest.mark.parametrize(
    ("cuts", "one_kernel"),
    [((33, 35, 98, 140), False), ((33, 34, 64, 65, 98, 138, 139, 140), True)],
    ids=["chunks", "chunks and single tokens by one kernel"],
)
@pytest.mark.parametrize("programs_per_sm", [1, 2], ids=["splits one by one", "splits side by side"])
def test_chunked_prompt_has_the_bits_of_one_piece(
    cuts: tuple[int, ...], one_kernel: bool, programs_per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    # The interpreter has one multiprocessor, with this many programs for one KV head.
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", programs_per_sm)
    whole = build(HeadShape(2, 1, 64), 16, [(0, 140)])  # three splits
    expected, pieces, start = paged_attention_triton(**vars(whole), one_kernel=one_kernel), [], 0
    for end in cuts:
        piece = dataclasses.replace(
            whole,
            query=whole.query[start:end],
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            max_query_len=end - start,
            max_seq_len=end,
        )
        pieces.append(paged_attention_triton(**vars(piece), one_kernel=one_kernel))
        start = end
    assert torch.equal(torch.cat(pieces), expected)
    assert_exact(whole, expected)


@pytest.mark.parametrize("programs_per_sm", [1, 20], ids=["splits one by one", "splits side by side"])
def test_decode_bits_do_not_depend_on_the_batch(programs_per_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", programs_per_sm)
    lengths = [(300, 1), (63, 1), (64, 1), (0, 1)]
    batch = build(HeadShape(6, 2, 64), 16, lengths)
    batch.seq_lens[3] = 0
    together = paged_attention_triton(**vars(batch), one_kernel=True)
    assert_exact(batch, together)
    monkeypatch.setattr(invariant, "PROGRAMS_PER_SM", 1)
    for sequence in range(len(lengths)):
        alone = dataclasses.replace(
            batch,
            query=batch.query[sequence : sequence + 1],
            block_tables=batch.block_tables[sequence : sequence + 1],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=batch.seq_lens[sequence : sequence + 1],
        )
        output = paged_attention_triton(**vars(alone), one_kernel=True)
        assert torch.equal(output, together[sequence : sequence + 1])


def test_comparison_detects_one_wrong_key() -> None:
    """Swapping two keys' values in one block of a long sequence must fail the comparison."""
    batch = build(HeadShape(4, 2, 64), 16, [(200, 1), (30, 12)])
    output = attend(batch)
    block = int(batch.block_tables[0, 3])
    batch.value_cache[block, :, [4, 5]] = batch.value_cache[block, :, [5, 4]]
    assert not measure_error(output, exact_attention(batch), TOLERANCE[output.dtype]).passed
