"""Shares of keys of decoding sequences: every tile once, evenly, and independent of padding."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels.attention.decode_shares import MIN_SHARE_TOKENS, ShareConfig, SharePlan, plan_shares
from kernels.attention.joined_rows import JoinedRows

KV_HEADS, TILE = 2, 16


def plan(lengths: list[tuple[int, int]], programs: int = 10, tail: int = 2) -> SharePlan:
    """Return the plan of `lengths`: (new tokens, total tokens) of each sequence."""
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    config = ShareConfig(TILE, 3, programs, tail)
    return plan_shares(starts, seq_lens, 4, KV_HEADS, 64, config, num_multiprocessors=1)


def cuts(made: SharePlan) -> list[tuple[int, int]]:
    """Return (first tile, end tile) of each share, as the kernel computes them."""
    _, _, tiles, long, short = made.counts.tolist()
    longs = made.num_long_shares
    starts = [
        share * long if share < longs else longs * long + (share - longs) * short for share in range(made.num_shares)
    ]
    sizes = [long] * longs + [short] * (made.num_shares - longs)
    return [(start, min(start + size, tiles)) for start, size in zip(starts, sizes, strict=True) if start < tiles]


SEQUENCES = st.lists(st.tuples(st.sampled_from([0, 1, 1, 1, 5]), st.integers(0, 9000)), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
@given(lengths=SEQUENCES, programs=st.sampled_from([2, 10, 32]), tail=st.sampled_from([0, 1, 3]))
def test_every_tile_is_in_one_share_with_its_row(lengths: list[tuple[int, int]], programs: int, tail: int) -> None:
    made = plan(lengths, programs, tail)
    decoding = [(index, seq_len) for index, (new, seq_len) in enumerate(lengths) if new == 1 and seq_len > 0]
    tiles = [-(-seq_len // TILE) for _, seq_len in decoding]
    assert made.counts[:3].tolist() == [len(decoding), lengths.count((1, 0)), sum(tiles)]
    row_of_tile = [row for row, count in enumerate(tiles) for _ in range(count)]
    covered: list[int] = []
    for share, (first, end) in enumerate(cuts(made)):
        assert made.share_rows[share] == row_of_tile[first]
        covered += range(first, end)
    assert covered == list(range(sum(tiles)))
    assert made.rows[: len(decoding), 0].tolist() == [index for index, _ in decoding]
    assert made.rows[: len(decoding), 2].tolist() == [seq_len for _, seq_len in decoding]
    assert made.rows[: len(decoding), 3].tolist() == [sum(tiles[:row]) for row in range(len(tiles))]
    assert not made.arrivals.any()


def test_shares_are_equal_except_the_remainder() -> None:
    made = plan([(1, 16 * 1000)] * 4, programs=20, tail=2)  # 4000 tiles, 10 long shares per KV head, 20 short ones
    assert made.counts.tolist() == [4, 0, 4000, 320, 40]
    assert cuts(made)[9:11] == [(2880, 3200), (3200, 3240)]


@pytest.mark.parametrize(("seq_len", "share_tokens"), [(1024, 128), (4096, 128), (6144, 192), (8192, 256), (9000, 256)])
def test_few_keys_have_shares_of_the_minimum_length(seq_len: int, share_tokens: int) -> None:
    assert plan([(1, seq_len)], programs=1000).counts[3] == share_tokens // TILE >= MIN_SHARE_TOKENS // TILE


def test_padding_does_not_change_the_shares() -> None:
    lengths = [(1, 700), (1, 3000), (1, 40)]
    bare, padded = plan(lengths), plan([*lengths, (1, 0), (1, 0)])
    assert cuts(bare) == cuts(padded)
    assert bare.rows.tolist() == padded.rows[:3].tolist()
    # Rows without keys are at the end in reverse order, so that their zeros are written.
    assert padded.rows[3:, :2].tolist() == [[4, 4], [3, 3]]
    assert padded.counts[1] == 2


def test_joined_rows_are_one_row_from_the_first_window_on() -> None:
    starts = torch.arange(6, dtype=torch.int32)
    seq_lens = torch.tensor([64, 65, 66, 33, 200], dtype=torch.int32)
    joined = JoinedRows(torch.tensor([0, 0, 0, 3, 4, 5], dtype=torch.int32), max_queries=4)
    made = plan_shares(starts, seq_lens, 4, KV_HEADS, 64, ShareConfig(TILE, 3, 10, 2), 1, window=16, joined=joined)
    # 66 keys: those before the window of the first query, 48 keys, are three tiles.
    assert made.counts[:3].tolist() == [3, 0, 2 + 2 + 2]
    assert made.rows[:3, :5].tolist() == [[2, 0, 66, 0, 3], [3, 3, 33, 2, 1], [4, 4, 200, 4, 1]]
