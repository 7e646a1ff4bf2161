"""Triton kernel for paged attention of sequences with several new tokens. paged_attention.py has the contract.

A program has a tile of rows, (token, query head) pairs of one KV head, so the GROUP query heads that share keys read
them once. Key tiles that every row sees need no mask; tiles cut by the diagonal or the window run in loops of their
own. Key tiles lie at absolute positions, so the order of a row's additions depends neither on the chunking of its
prompt nor on the rows of a tile. With SPLIT_TOKENS the softmax restarts at each multiple (see invariant.py).
"""
# A kernel is one function (ADR 0108).
# ruff: noqa: PLR0915

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.decode import num_multiprocessors
from kernels.attention.online_softmax import LOG2_E, weigh, with_sinks
from kernels.attention.operands import query_operand
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.dependent_launch import dependent_launch


@dataclass(frozen=True)
class PrefillConfig:
    """Tile of rows (tokens x group) by keys, warps and pipeline stages; the tests compile each one for sm_90."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


SHORT_TILES, SMALL_TILES, LARGE_TILES = (
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(256, 64, 16, 3),
)


# For heads over 128 elements: results of 128 rows take half of all registers. Keys and values of three tiles need more
# shared memory (262,144 bytes) than a program has on sm_90 (232,448), and no compiler fits 256 rows. With an e4m3
# cache, tiles of 64 keys spill 340 bytes and tiles of 32 keys 100 bytes.
WIDE_TILES, WIDE_FP8_TILES = PrefillConfig(128, 64, 8, 2), PrefillConfig(128, 32, 8, 2)
MAX_HEAD_DIM = 256


def prefill_config(
    dtype: torch.dtype,
    head_dim: int,
    num_rows: int,
    max_rows: int,
    num_multiprocessors: int,
    is_fp8: bool = False,
) -> PrefillConfig:
    """Return the tile configuration. All configurations give the same bits.

    Short tiles, two programs per SM, serve a few tokens, for which larger ones would be mostly empty. Large tiles load
    keys half as often: 491 against 446 TFLOP/s at 8192 tokens and 412 against 368 at 2048 (256 tiles). At 1024 tokens
    (128 tiles) the longest runs alone: 206 against 292. An e4m3 cache does not use them, because the conversion needs
    registers that 16 warps do not have and spills 800 bytes.

    Args:
        dtype: Dtype of the queries.
        head_dim: Elements per head.
        num_rows: New tokens times query heads, of all sequences.
        max_rows: New tokens times query heads per KV head, of the longest sequence.
        num_multiprocessors: SMs of the device.
        is_fp8: The cache is e4m3.
    """
    if dtype == torch.float32:
        # For tests and debugging: 32 rows, or 64 keys, spill at D 128 with the three products of tf32x3.
        return PrefillConfig(16, 32 if head_dim <= 128 else 16, 4, 2)
    if head_dim > 128:
        return WIDE_FP8_TILES if is_fp8 else WIDE_TILES
    if max_rows <= SHORT_TILES.block_m:
        return SHORT_TILES
    fills = not is_fp8 and 2 * num_rows >= 3 * num_multiprocessors * LARGE_TILES.block_m
    return LARGE_TILES if fills and max_rows >= 4 * LARGE_TILES.block_m else SMALL_TILES


@triton.jit
def _used(keys, seq_len, first_visible, WINDOW: tl.constexpr):
    used = keys < seq_len
    if WINDOW > 0:
        used = used & (keys >= first_visible)
    return used


@triton.jit
def _attend_keys(
    query_tile, accumulator, row_sum, row_max, key_head, block_table, first_key, end_key, row_positions, seq_len,
    first_visible, scale_log2, cache_block_stride, cache_slot_stride,
    VALUE_OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add keys [first_key, end_key) to the running softmax (accumulator, row_sum, row_max in log2 units).

    No row sees a key before `first_visible`.
    """
    tile, lanes = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DIM)
    # Unsigned 32 x 32 -> 64 bits is one instruction. Offsets exceed int32 from block 2048 of an 8B model.
    block_stride = tl.cast(cache_block_stride, tl.uint32).to(tl.uint64)
    # The block ids of a tile are loaded one iteration ahead. Loaded in their own iteration, the loads of keys and
    # values would depend on a load, and the pipeliner would keep one tile in flight instead of two.
    lane_blocks = tile // BLOCK_SIZE
    first_used = _used(first_key + tile, seq_len, first_visible, WINDOW)
    block_ids = tl.load(block_table + first_key // BLOCK_SIZE + lane_blocks, mask=first_used, other=0)
    for start in tl.range(first_key, end_key, BLOCK_N, num_stages=NUM_STAGES):
        keys = start + tile
        next_block_ids = tl.load(
            block_table + (start + BLOCK_N) // BLOCK_SIZE + lane_blocks, mask=keys + BLOCK_N < seq_len, other=0
        )
        key_pointers = key_head + (block_ids.to(tl.uint32).to(tl.uint64) * block_stride)[:, None]
        if BLOCK_SIZE > BLOCK_N:
            key_pointers += start % BLOCK_SIZE * cache_slot_stride
        if HEAD_DIM == BLOCK_DIM:
            key_tile = tl.load(key_pointers)
        else:
            key_tile = tl.load(key_pointers, mask=(lanes < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(query_tile, tl.trans(key_tile.to(query_tile.dtype)), input_precision=PRECISION)
        visible = None
        if MASKED:
            visible = keys[None, :] <= row_positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > row_positions[:, None] - WINDOW)
        weights, decay, new_max = weigh(scores, visible, row_max, scale_log2, SOFTCAP)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        row_max = new_max
        value_pointers = key_pointers + VALUE_OFFSET
        if MASKED:
            # A weight of 0 does not cancel NaN, so values of unused slots must not be loaded.
            used = _used(keys, seq_len, first_visible, WINDOW)[:, None] & (lanes < HEAD_DIM)[None, :]
            value_tile = tl.load(value_pointers, mask=used, other=0.0)
        elif HEAD_DIM == BLOCK_DIM:
            value_tile = tl.load(value_pointers)
        else:
            value_tile = tl.load(value_pointers, mask=(lanes < HEAD_DIM)[None, :], other=0.0)
        value_tile = value_tile.to(query_tile.dtype)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=PRECISION)
        block_ids = next_block_ids
    return accumulator, row_sum, row_max


@triton.jit
def merge_split(combined, total, maximum, attended, lse):
    """Merge another split (normalized; lse is the log2 of its sum of exponentials) into the earlier ones.

    The same operations in the same order serve all callers, so no compiler can fuse them differently.
    """
    new_maximum = tl.maximum(maximum, lse)
    # A row without keys so far has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight, decay = tl.exp2(lse - shift), tl.exp2(maximum - shift)
    combined = tl.fma(attended, tl.broadcast_to(weight[:, None], attended.shape), combined * decay[:, None])
    return combined, tl.fma(total, decay, weight), new_maximum


@triton.jit
def _sequence_of_tile(query_start_loc, tile, num_sequences, TILE_TOKENS: tl.constexpr):
    """Return the sequence of a tile.

    Sequence s has the tiles from start // TILE_TOKENS + s on. This is an upper bound of its need that requires no plan
    from the host.
    """
    sequence, beyond = 0, num_sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(query_start_loc + middle) // TILE_TOKENS + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    return sequence


@triton.jit
def _attend_split(
    query_tile, key_head, block_table, first_key, first_masked_key, end_key, row_positions, seq_len, first_visible,
    tile_end, heads, sinks, scale_log2, value_scale, cache_block_stride, cache_slot_stride,
    VALUE_OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return (normalized result, log2 of the sum of exponentials) for keys [first_key, end_key).

    No row sees a key before `first_visible`, and the last row sees none from `tile_end` on.
    """
    accumulator = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if WINDOW > 0:
        # From here on all rows have the keys inside their windows.
        first_plain_key = tl.cdiv(tl.maximum(tile_end - WINDOW, 0), BLOCK_N) * BLOCK_N
        first_plain_key = tl.minimum(tl.maximum(first_plain_key, first_key), first_masked_key)
        accumulator, row_sum, row_max = _attend_keys(
            query_tile, accumulator, row_sum, row_max, key_head, block_table, first_key, first_plain_key,
            row_positions, seq_len, first_visible, scale_log2, cache_block_stride, cache_slot_stride, VALUE_OFFSET,
            HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_N, True, PRECISION, 1, WINDOW, SOFTCAP,
        )  # fmt: skip
        first_key = first_plain_key
    accumulator, row_sum, row_max = _attend_keys(
        query_tile, accumulator, row_sum, row_max, key_head, block_table, first_key, first_masked_key, row_positions,
        seq_len, first_visible, scale_log2, cache_block_stride, cache_slot_stride, VALUE_OFFSET, HEAD_DIM, BLOCK_DIM,
        BLOCK_SIZE, BLOCK_N, False, PRECISION, NUM_STAGES, WINDOW, SOFTCAP,
    )  # fmt: skip
    accumulator, row_sum, row_max = _attend_keys(
        query_tile, accumulator, row_sum, row_max, key_head, block_table, first_masked_key, end_key, row_positions,
        seq_len, first_visible, scale_log2, cache_block_stride, cache_slot_stride, VALUE_OFFSET, HEAD_DIM, BLOCK_DIM,
        BLOCK_SIZE, BLOCK_N, True, PRECISION, 1, WINDOW, SOFTCAP,
    )  # fmt: skip
    row_sum = with_sinks(row_sum, row_max, sinks, heads, heads >= 0)
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    attended = accumulator / divisor[:, None]
    if value_scale is not None:
        attended *= value_scale
    return attended, row_max + tl.log2(divisor)


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def prefill_kernel(
    query, key_cache, block_tables, query_start_loc, seq_lens, output, splits, split_lse, scale_log2, value_scale,
    sinks, query_token_stride, query_head_stride, cache_block_stride, cache_head_stride, cache_slot_stride,
    table_stride, num_sequences,
    VALUE_OFFSET: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_QUERY_LEN: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr, JOINED: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run program (KV head of a tile of tokens, share of the splits).

    With several shares, MAX_SPLITS > 0, each token's splits are stored at [token, MAX_SPLITS, head, HEAD_DIM], from
    the first in its window on. Rows are single tokens, or with JOINED few.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Last tiles first: they see the most keys, and a long program that starts last would run alone.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, tile = program % NUM_KV_HEADS, program // NUM_KV_HEADS
    sequence = _sequence_of_tile(query_start_loc, tile, num_sequences, TILE_TOKENS)
    first_row = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_row
    first_token = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    # With 2, sequences with one new token are left to the decode kernel.
    if (query_len < MIN_QUERY_LEN) | (first_token >= query_len):
        return
    rows, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DIM)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    owned = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
    token_rows = (first_row + tokens).to(tl.int64)
    read = token_rows[:, None] * query_token_stride + heads[:, None] * query_head_stride + lanes[None, :]
    query_tile = query_operand(tl.load(query + read, mask=owned, other=0.0), key_cache)

    seq_len = tl.load(seq_lens + sequence)
    first_position = seq_len - query_len + first_token
    row_positions = tl.minimum(first_position + rows // GROUP, seq_len - 1)
    end_key = tl.minimum(first_position + TILE_TOKENS, seq_len)
    first_masked_key = tl.maximum(tl.minimum(first_position + 1, end_key), 0) // BLOCK_N * BLOCK_N
    first_visible, first_tile_key = 0, 0
    if WINDOW > 0:
        first_visible = tl.maximum(first_position - WINDOW + 1, 0)
        first_tile_key = first_visible // BLOCK_N * BLOCK_N
        first_masked_key = tl.maximum(first_masked_key, first_tile_key)
    block_table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    # A tile starts at a multiple of BLOCK_N, so a key's slot in its block is that of its lane.
    slots = tl.arange(0, BLOCK_N) % BLOCK_SIZE * cache_slot_stride
    key_head = key_cache + tl.cast(kv_head, tl.int64) * cache_head_stride + slots[:, None] + lanes[None, :]
    if SPLIT_TOKENS == 0:
        attended, _ = _attend_split(
            query_tile, key_head, block_table, first_tile_key, first_masked_key, end_key, row_positions, seq_len,
            first_visible, end_key, heads, sinks, scale_log2, value_scale, cache_block_stride, cache_slot_stride,
            VALUE_OFFSET, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION, NUM_STAGES, WINDOW, SOFTCAP,
        )  # fmt: skip
    else:
        attended = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        step = tl.num_programs(1) * SPLIT_TOKENS
        first_split = first_tile_key // SPLIT_TOKENS
        for split_key in tl.range((first_split + tl.program_id(1)) * SPLIT_TOKENS, end_key, step, num_stages=1):
            split_end = tl.minimum(split_key + SPLIT_TOKENS, end_key)
            first_key = tl.maximum(split_key, first_tile_key) if WINDOW > 0 else split_key
            split, lse = _attend_split(
                query_tile, key_head, block_table, first_key,
                tl.minimum(tl.maximum(first_masked_key, first_key), split_end), split_end, row_positions, seq_len,
                first_visible, end_key, heads, None, scale_log2, value_scale, cache_block_stride, cache_slot_stride,
                VALUE_OFFSET, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION, NUM_STAGES, WINDOW, SOFTCAP,
            )  # fmt: skip
            if MAX_SPLITS > 0:
                number, is_written, written = split_key // SPLIT_TOKENS - first_split, is_row, owned
                if JOINED:
                    if WINDOW > 0:
                        number += first_split - tl.maximum(row_positions - WINDOW + 1, 0) // SPLIT_TOKENS
                    # Other tokens of the tile may see splits that a token does not see.
                    is_written = is_row & (number >= 0) & (row_positions >= split_key)
                    written = owned & is_written[:, None]
                token = token_rows if JOINED else first_row.to(tl.int64)
                place = (token * MAX_SPLITS + number) * (NUM_KV_HEADS * GROUP) + heads
                tl.store(splits + place[:, None] * HEAD_DIM + lanes[None, :], split, mask=written)
                tl.store(split_lse + place, lse, mask=is_written)
            else:
                attended, total, maximum = merge_split(attended, total, maximum, split, lse)
        total = with_sinks(total, maximum, sinks, heads, heads >= 0)
        attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    if MAX_SPLITS == 0:
        write = (token_rows * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + lanes[None, :]
        tl.store(output + write, attended.to(output.dtype.element_ty), mask=owned)


def attend_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    max_query_len: int,
    scale: float,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Write the output rows of sequences with at least two new tokens.

    Args:
        query: [T, Hq, D].
        key_cache: [N, Hkv, BS, D].
        value_cache: [N, Hkv, BS, D], with the strides of key_cache.
        block_tables: [S, B], int32.
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        output: [T, Hq, D], contiguous.
        max_query_len: Upper bound of new tokens per sequence.
        scale: Factor of the scores.
        value_scale: Factor of e4m3 values; None for other caches.
        rules: Window, softcap and sinks.
    """
    num_rows, max_rows = query.shape[0] * query.shape[1], max_query_len * (query.shape[1] // key_cache.shape[1])
    is_fp8 = value_scale is not None
    processors = num_multiprocessors(query.device)
    config = prefill_config(query.dtype, query.shape[2], num_rows, max_rows, processors, is_fp8)
    caches, lengths = (key_cache, value_cache, block_tables), (query_start_loc, seq_lens)
    launch_prefill(query, *caches, *lengths, output, scale, config, SplitPrefill(min_query_len=2), value_scale, rules)


@dataclass(frozen=True)
class SplitPrefill:
    """How the keys of a row are split.

    Several programs per row need room for the splits [T, max_splits, Hq, D] and their lse [T, max_splits, Hq], float32.
    """

    min_query_len: int  # shorter sequences are skipped
    split_tokens: int = 0  # 0: no splits
    programs: int = 1  # per row
    max_splits: int = 0
    splits: Tensor | None = None
    split_lse: Tensor | None = None
    joined: bool = False  # rows may have several tokens, each of which has splits of its own


def launch_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    scale: float,
    config: PrefillConfig,
    split: SplitPrefill,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Launch prefill_kernel with a configuration and a split; the other arguments are those of attend_prefill()."""
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_tokens, num_heads = query.shape[:2]
    num_sequences, group = seq_lens.shape[0], num_heads // num_kv_heads
    block_m = max(config.block_m, triton.next_power_of_2(group))
    max_tiles = num_tokens // (block_m // group) + num_sequences
    prefill_kernel[(max_tiles * num_kv_heads, split.programs)](
        query,
        key_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        output,
        output if split.splits is None else split.splits,
        output if split.split_lse is None else split.split_lse,
        scale * LOG2_E,
        value_scale,
        rules.sinks,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        num_sequences,
        VALUE_OFFSET=value_cache.storage_offset() - key_cache.storage_offset(),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        # At least 64: Triton 3.6 has sporadic illegal accesses on Hopper with tiles of 32 lanes and several dots.
        BLOCK_DIM=max(64, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        MIN_QUERY_LEN=split.min_query_len,
        SPLIT_TOKENS=split.split_tokens,
        MAX_SPLITS=split.max_splits,
        JOINED=split.joined,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        NUM_STAGES=config.num_stages,
        WINDOW=rules.window,
        SOFTCAP=rules.softcap,
        num_warps=config.num_warps,
        **dependent_launch(query),
    )
