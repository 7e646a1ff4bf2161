"""Batch-invariant paged attention: a token's bits depend only on itself and the tokens before it.

One kernel serves decode and prefill: a row's keys are cut at each multiple of SPLIT_TOKENS, and the splits are merged
in order. For a few decoding sequences, splits are computed in parallel and merged by a second kernel with the same
operations. Tile size and merging kernel do not change a bit, so a token has the same result decoded, prefilled,
chunked or recomputed. paged_attention.py has the contract.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.decode import num_multiprocessors
from kernels.attention.joined_rows import JoinedRows
from kernels.attention.online_softmax import with_sinks
from kernels.attention.prefill import (
    SHORT_TILES,
    SMALL_TILES,
    PrefillConfig,
    SplitPrefill,
    launch_prefill,
    merge_split,
    prefill_config,
)
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.dependent_launch import dependent_launch

# Shorter splits are merged more often in prefill; longer ones leave a single sequence with fewer programs.
SPLIT_TOKENS = 512
PROGRAMS_PER_SM = 2  # for short tiles


@triton.jit
def merge_splits_kernel(
    splits, split_lse, query_start_loc, seq_lens, sinks, output,
    SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row, for program (query head, sequence)."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head, sequence = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - row != 1:
        return
    lanes = tl.arange(0, BLOCK_DIM)
    inside = (lanes < HEAD_DIM)[None, :]
    combined = tl.zeros([1, BLOCK_DIM], dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    maximum = tl.full([1], float("-inf"), dtype=tl.float32)
    seq_len = tl.load(seq_lens + sequence)
    num_splits = tl.cdiv(seq_len, SPLIT_TOKENS)
    if WINDOW > 0:
        num_splits -= tl.maximum(seq_len - WINDOW, 0) // SPLIT_TOKENS
    for split in range(num_splits):
        place = (row.to(tl.int64) * MAX_SPLITS + split) * NUM_HEADS + head
        attended = tl.load(splits + place * HEAD_DIM + lanes[None, :], mask=inside, other=0.0)
        lse = tl.load(split_lse + place + tl.zeros([1], dtype=tl.int32))
        combined, total, maximum = merge_split(combined, total, maximum, attended, lse)
    total = with_sinks(total, maximum, sinks, head + tl.zeros([1], dtype=tl.int32), total >= 0.0)
    combined = combined / tl.where(total == 0.0, 1.0, total)[:, None]
    write = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + lanes[None, :]
    tl.store(output + write, combined.to(output.dtype.element_ty), mask=inside)


# For heads over 128 elements, in prompts and decoding alike: another number of warps would change the order of a row's
# sums. Two results of 64 rows leave few registers: merging spills 1,452 bytes, with four warps 2,908.
WIDE_SPLIT_TILES = PrefillConfig(64, 64, 8, 2)


def invariant_config(dtype: torch.dtype, head_dim: int, max_rows: int) -> PrefillConfig:
    """Return the tiles. Large ones are never used: the merged result needs as many registers as the current split."""
    if dtype == torch.float32:
        return prefill_config(dtype, head_dim, 0, max_rows, 1)
    if head_dim > 128:
        return WIDE_SPLIT_TILES
    return SHORT_TILES if max_rows <= SHORT_TILES.block_m else SMALL_TILES


def attend_invariant(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
    joined: JoinedRows | None = None,
) -> None:
    """Write all output rows with batch-invariant bits.

    Args:
        query: [T, Hq, D].
        key_cache: [N, Hkv, BS, D].
        value_cache: [N, Hkv, BS, D], with the strides of key_cache.
        block_tables: [S, B], int32.
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        output: [T, Hq, D], contiguous.
        max_query_len: Upper bound of new tokens per sequence.
        max_seq_len: Upper bound of seq_lens.
        scale: Factor of the scores.
        value_scale: Factor of e4m3 values; None for other caches.
        rules: Window, softcap and sinks.
        joined: The rows with those of one sequence joined; None: each row for itself.
    """
    joined = joined or JoinedRows(query_start_loc, 1)
    num_sequences, num_heads, head_dim = seq_lens.shape[0], query.shape[1], query.shape[2]
    num_kv_heads = key_cache.shape[1]
    max_splits = triton.cdiv(max_seq_len, SPLIT_TOKENS)
    if rules.window:  # a window may start and end within a split
        max_splits = min(max_splits, triton.cdiv(rules.window, SPLIT_TOKENS) + 1)
    num_joined = triton.cdiv(num_sequences, joined.max_queries)
    programs = PROGRAMS_PER_SM * num_multiprocessors(query.device) // (num_joined * num_kv_heads)
    programs = min(programs, max_splits) if max_query_len == 1 else 1
    most_queries = max(max_query_len, joined.max_queries)
    config = invariant_config(query.dtype, head_dim, most_queries * (num_heads // num_kv_heads))
    split = SplitPrefill(min_query_len=1, split_tokens=SPLIT_TOKENS)
    if programs > 1:
        splits = query.new_empty(num_sequences, max_splits, num_heads, head_dim, dtype=torch.float32)
        lse, has_joined = splits.new_empty(splits.shape[:3]), joined.max_queries > 1
        split = SplitPrefill(1, SPLIT_TOKENS, programs, max_splits, splits, lse, has_joined)
    caches = (key_cache, value_cache, block_tables)
    launch_prefill(
        query, *caches, joined.query_start_loc, seq_lens, output, scale, config, split, value_scale, rules
    )  # fmt: skip
    if programs > 1:
        merge_splits_kernel[(num_heads, num_sequences)](
            split.splits,
            split.split_lse,
            query_start_loc,
            seq_lens,
            rules.sinks,
            output,
            SPLIT_TOKENS=SPLIT_TOKENS,
            MAX_SPLITS=max_splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_DIM=max(64, triton.next_power_of_2(head_dim)),
            WINDOW=rules.window,
            num_warps=1,
            **dependent_launch(query),
        )
