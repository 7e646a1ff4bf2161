"""The plan shared by the layers of a step on Hopper: the keys of all decoding sequences in shares of equal size.

The key tiles of the sequences with one new token are concatenated and cut into shares: one long share per program of a
KV head that the device runs at once, then `tail` short shares per long one for the programs that finish first, because
some SMs are closer to memory. A sequence in several shares is combined from as many splits. The cuts depend on the
whole batch (ADR 0044). A launch never waits for the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.joined_rows import JoinedRows, decoding_queries

# int32 fields of a row: sequence, first row of query and output, keys, tiles of the rows before it, and the queries if
# there may be several. Tiles completely before the window are not counted.
ROW_FIELDS, JOINED_ROW_FIELDS = 4, 8
# Smaller shares cost more to join than they save: 8192 keys of one sequence took 17.8 us in shares of 256 and 20.4 us
# in
# shares of 128; 1024 keys took 11.0 and 7.2 us.
MIN_SHARE_TOKENS, FULL_SHARE_TOKENS, FULL_SHARE_FROM_TOKENS = 128, 256, 8192
# Percentage of the tiles that goes to short shares.
TAIL_PERCENT = 20
SEQUENCES_COUNTED_AT_ONCE = 512


@dataclass(frozen=True)
class ShareConfig:
    """Keys per tile, tiles in shared memory, concurrent programs per SM, short shares per long share."""

    tile: int
    num_stages: int
    programs_per_sm: int
    tail: int


# By rows of the batch including padding, ascending. Chosen from fourteen batches, 1 x 1024 to 256 x 8192 (ADR 0044).
H200_CONFIGS = (
    (8, ShareConfig(tile=32, num_stages=3, programs_per_sm=4, tail=2)),
    (48, ShareConfig(tile=32, num_stages=3, programs_per_sm=4, tail=0)),
    (None, ShareConfig(tile=32, num_stages=2, programs_per_sm=6, tail=2)),
)
# For e4m3: the same bytes in flight. With many rows, tiles of 64 keys took 134 us for 256 x 1024, and eight programs of
# 32 keys took 141 us; batches of few long rows showed no difference.
H200_FP8_CONFIGS = (
    (8, ShareConfig(tile=64, num_stages=3, programs_per_sm=4, tail=2)),
    (48, ShareConfig(tile=64, num_stages=3, programs_per_sm=4, tail=0)),
    (None, ShareConfig(tile=64, num_stages=2, programs_per_sm=6, tail=2)),
)


def share_config(num_rows: int, is_fp8: bool = False) -> ShareConfig:
    """Return the configuration for this number of rows, padding included."""
    configs = H200_FP8_CONFIGS if is_fp8 else H200_CONFIGS
    return next(config for max_rows, config in configs if max_rows is None or num_rows <= max_rows)


@dataclass(frozen=True)
class SharePlan:
    rows: Tensor  # [S, fields] int32: rows with keys from the front, rows without keys from the back
    counts: Tensor  # [5] int32: rows with keys, rows without, tiles, tiles per long share, tiles per short share
    share_rows: Tensor  # [shares] int32: index of the row in which a share starts; undefined after the last tile
    arrivals: Tensor  # [shares, Hkv] int32, 0 between layers: finished splits of the row that leaves a share
    splits: Tensor  # [shares * 2, max_queries, Hq, D] float32, normalized per split
    split_lse: Tensor  # [shares * 2, max_queries, Hq] float32, log2 of the sum of exponentials
    max_queries: int
    num_long_shares: int
    num_shares: int
    tile: int
    num_stages: int


@triton.jit
def _tiles(query_start_loc, joined, seq_lens, sequence, inside, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return (tiles with keys, whether the row has no keys) of decoding sequences; 0 for all others."""
    decodes, queries = decoding_queries(query_start_loc, joined, sequence, inside)
    seq_len = tl.load(seq_lens + sequence, mask=inside, other=0)
    tiles = tl.cdiv(seq_len, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(seq_len - (queries - 1) - WINDOW, 0) // TILE
    return tl.where(decodes, tiles, 0), (decodes & (tiles == 0)).to(tl.int32)


@triton.jit
def _share_tiles(
    tiles, LONG_SHARES: tl.constexpr, SHORT_SHARES: tl.constexpr, TILE: tl.constexpr, MIN_TOKENS: tl.constexpr,
    FULL_TOKENS: tl.constexpr, FULL_FROM_TOKENS: tl.constexpr, TAIL_PERCENT: tl.constexpr,
):  # fmt: skip
    """Return (tiles per long share, tiles per short share)."""
    full = tl.cdiv(FULL_TOKENS, TILE)
    least = tl.minimum(tl.maximum(tiles * FULL_TOKENS // FULL_FROM_TOKENS, tl.cdiv(MIN_TOKENS, TILE)), full)
    if SHORT_SHARES == 0:
        return tl.maximum(tl.cdiv(tiles, LONG_SHARES), least), least
    # In two steps: a product with 100 would overflow int32 at 21 million tiles.
    long = tl.maximum(tiles // LONG_SHARES * (100 - TAIL_PERCENT) // 100, least)
    rest = tl.maximum(tiles - long * LONG_SHARES, 0)
    return long, tl.maximum(tl.cdiv(rest, SHORT_SHARES), tl.cdiv(MIN_TOKENS, TILE))


@triton.jit(do_not_specialize=["num_sequences"])
def plan_shares_kernel(
    query_start_loc, joined, seq_lens, rows, counts, share_rows, arrivals, num_sequences,
    LONG_SHARES: tl.constexpr, SHORT_SHARES: tl.constexpr, NUM_ARRIVALS: tl.constexpr, TILE: tl.constexpr,
    MIN_TOKENS: tl.constexpr, FULL_TOKENS: tl.constexpr, FULL_FROM_TOKENS: tl.constexpr, TAIL_PERCENT: tl.constexpr,
    ROW_FIELDS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, BLOCK_SHARES: tl.constexpr,
    WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr,
):  # fmt: skip
    """Write the entry of one sequence. Each program counts all others: a thousand integers from L2, once per step."""
    sequence = tl.program_id(0)
    all_tiles, tiles_before, rows_in_all, rows_before, empty_in_all, empty_before = 0, 0, 0, 0, 0, 0
    for first in range(0, num_sequences, BLOCK_SEQUENCES):
        others = first + tl.arange(0, BLOCK_SEQUENCES)
        inside = others < num_sequences
        tiles, is_empty = _tiles(query_start_loc, joined, seq_lens, others, inside, TILE, WINDOW)
        is_before, has_tiles = others < sequence, (tiles > 0).to(tl.int32)
        all_tiles += tl.sum(tiles, axis=0)
        tiles_before += tl.sum(tl.where(is_before, tiles, 0), axis=0)
        rows_in_all += tl.sum(has_tiles, axis=0)
        rows_before += tl.sum(tl.where(is_before, has_tiles, 0), axis=0)
        empty_in_all += tl.sum(is_empty, axis=0)
        empty_before += tl.sum(tl.where(is_before, is_empty, 0), axis=0)
    long, short = _share_tiles(
        all_tiles, LONG_SHARES, SHORT_SHARES, TILE, MIN_TOKENS, FULL_TOKENS, FULL_FROM_TOKENS, TAIL_PERCENT
    )
    tiles, is_empty = _tiles(query_start_loc, joined, seq_lens, sequence, True, TILE, WINDOW)
    if tiles + is_empty > 0:
        place = rows + tl.where(is_empty > 0, num_sequences - 1 - empty_before, rows_before) * ROW_FIELDS
        tl.store(place, sequence)
        tl.store(place + 1, tl.load(joined + sequence))
        tl.store(place + 2, tl.load(seq_lens + sequence))
        tl.store(place + 3, tiles_before)
        if MAX_QUERIES > 1:
            tl.store(place + 4, tl.load(joined + sequence + 1) - tl.load(joined + sequence))
    tiles_end, long_end = tiles_before + tiles, long * LONG_SHARES
    # The shares that start in this row: long ones first, then short ones.
    first_share = tl.minimum(tl.cdiv(tiles_before, long), LONG_SHARES)
    first_share += tl.cdiv(tl.maximum(tiles_before - long_end, 0), short)
    end_share = tl.minimum(tl.cdiv(tiles_end, long), LONG_SHARES)
    end_share += tl.cdiv(tl.maximum(tiles_end - long_end, 0), short)
    for first in range(first_share, end_share, BLOCK_SHARES):
        shares = first + tl.arange(0, BLOCK_SHARES)
        tl.store(share_rows + shares, tl.zeros_like(shares) + rows_before, mask=shares < end_share)
    if sequence == 0:
        tl.store(counts, rows_in_all)
        tl.store(counts + 1, empty_in_all)
        tl.store(counts + 2, all_tiles)
        tl.store(counts + 3, long)
        tl.store(counts + 4, short)
        for first in range(0, NUM_ARRIVALS, BLOCK_SHARES):
            places = first + tl.arange(0, BLOCK_SHARES)
            tl.store(arrivals + places, tl.zeros_like(places), mask=places < NUM_ARRIVALS)


def plan_shares(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    config: ShareConfig,
    num_multiprocessors: int,
    window: int = 0,
    joined: JoinedRows | None = None,
) -> SharePlan:
    """Plan the shares of one step.

    Args:
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements per head.
        config: From share_config().
        num_multiprocessors: SMs of the device.
        window: Visible keys per token; 0: all.
        joined: The rows with those of one sequence joined; None: each row for itself.
    """
    joined = joined or JoinedRows(query_start_loc, 1)
    max_queries = joined.max_queries
    row_fields = ROW_FIELDS if max_queries == 1 else JOINED_ROW_FIELDS
    num_sequences, tile = seq_lens.shape[0], config.tile
    num_long_shares = max(1, config.programs_per_sm * num_multiprocessors // num_kv_heads)
    num_shares = num_long_shares * (1 + config.tail)
    plan = SharePlan(
        rows=seq_lens.new_empty(num_sequences, row_fields),
        counts=seq_lens.new_empty(5),
        share_rows=seq_lens.new_empty(num_shares),
        arrivals=seq_lens.new_empty(num_shares, num_kv_heads),
        splits=seq_lens.new_empty(num_shares * 2, max_queries, num_heads, head_dim, dtype=torch.float32),
        split_lse=seq_lens.new_empty(num_shares * 2, max_queries, num_heads, dtype=torch.float32),
        max_queries=max_queries,
        num_long_shares=num_long_shares,
        num_shares=num_shares,
        tile=tile,
        num_stages=config.num_stages,
    )
    plan_shares_kernel[(num_sequences,)](
        query_start_loc,
        joined.query_start_loc,
        seq_lens,
        plan.rows,
        plan.counts,
        plan.share_rows,
        plan.arrivals,
        num_sequences,
        LONG_SHARES=num_long_shares,
        SHORT_SHARES=num_shares - num_long_shares,
        NUM_ARRIVALS=plan.arrivals.numel(),
        TILE=tile,
        MIN_TOKENS=MIN_SHARE_TOKENS,
        FULL_TOKENS=FULL_SHARE_TOKENS,
        FULL_FROM_TOKENS=FULL_SHARE_FROM_TOKENS,
        TAIL_PERCENT=TAIL_PERCENT,
        ROW_FIELDS=row_fields,
        BLOCK_SEQUENCES=SEQUENCES_COUNTED_AT_ONCE,
        BLOCK_SHARES=128,
        WINDOW=window,
        MAX_QUERIES=max_queries,
        num_warps=4,
    )
    return plan
