"""Triton kernels for paged attention of sequences with one new token, or few. paged_attention.py has the contract.

decode_kernel is persistent: a program has one KV head and runs over its share of the plan's items in one loop over key
tiles, so the next item's loads are in flight during the last tile of the current one. combine_splits_kernel joins the
splits of a row. The GROUP query heads that share a KV head, for each query, are the rows of a tile, so keys are read
once.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.decode_plan import ITEM_FIELDS, DecodePlan
from kernels.attention.online_softmax import LOG2_E, weigh, with_sinks
from kernels.attention.operands import query_operand
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.dependent_launch import dependent_launch


@dataclass(frozen=True)
class DecodeConfig:
    """Keys per tile, warps and pipeline stages; the tests compile each configuration for sm_90."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_config(dtype: torch.dtype, head_dim: int, is_fp8: bool = False) -> DecodeConfig:
    """Return the tile configuration.

    Heads of 256 use half as many keys as heads of 128, that is, tiles of the same bytes. With an e4m3 cache they use a
    quarter: the conversion takes registers, and half as many keys spill 144 bytes.
    """
    # float32 is for tests and debugging: at D 128, 64 keys spill with the three products of tf32x3.
    block_n = 32 if dtype == torch.float32 else 128
    return DecodeConfig(block_n if head_dim <= 128 else block_n // (4 if is_fp8 else 2), 4, 2)


# Two programs of 78 KB shared memory and 207 registers fit on an SM; one loads its next tile while the other computes.
PROGRAMS_PER_SM = 2
SPLITS_COMBINED_AT_ONCE = 4
COMBINE_WARPS = 2


@triton.jit
def _load_item(items, part, num_items, ITEM_FIELDS: tl.constexpr, WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr):
    """Return (sequence, row, first key, end key, splits, first visible key, queries, keys of the sequence).

    After the end of the list all are 0. What WINDOW and MAX_QUERIES do not need is constant.
    """
    item = items + part * ITEM_FIELDS
    inside = part < num_items
    return (
        tl.load(item, mask=inside, other=0),
        tl.load(item + 1, mask=inside, other=0),
        tl.load(item + 2, mask=inside, other=0),
        tl.load(item + 3, mask=inside, other=0),
        tl.load(item + 4, mask=inside, other=0),
        tl.load(item + 5, mask=inside, other=0) if WINDOW > 0 else 0,
        tl.load(item + 6, mask=inside, other=0) if MAX_QUERIES > 1 else 1,
        tl.load(item + 7, mask=inside, other=0) if MAX_QUERIES > 1 else 0,
    )


@triton.jit
def _visible(keys, first_visible, end_key, WINDOW: tl.constexpr):
    visible = keys < end_key
    if WINDOW > 0:
        visible = visible & (keys >= first_visible)
    return visible


@triton.jit
def _query_and_head(rows, GROUP: tl.constexpr, MAX_QUERIES: tl.constexpr):
    """Return the query and the head of the rows of a tile."""
    return (rows // GROUP, rows % GROUP) if MAX_QUERIES > 1 else (0, rows)


@triton.jit
def _count_tiles(
    items, num_items, first, step, BLOCK_N: tl.constexpr, ITEM_FIELDS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return the number of tiles of items first, first + step, ...; an empty item has one, which writes zeros."""
    tiles = 0
    for start in range(first, num_items, step * AT_ONCE):
        parts = start + step * tl.arange(0, AT_ONCE)
        inside = parts < num_items
        first_keys = tl.load(items + parts * ITEM_FIELDS + 2, mask=inside, other=0)
        end_keys = tl.load(items + parts * ITEM_FIELDS + 3, mask=inside, other=0)
        counts = tl.maximum(tl.cdiv(end_keys - first_keys, BLOCK_N), 1)
        tiles += tl.sum(tl.where(inside, counts, 0), axis=0)
    return tiles


@triton.jit
def _attend_tile(
    query_tile, key_pointers, keys, first_visible, end_key, row_ends, accumulator, sums, row_max, scale_log2,
    VALUE_OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MAX_QUERIES: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax (accumulator, sums per key lane, row_max in log2 units).

    Some row sees the keys [first_visible, end_key); with several queries, a row sees none from its `row_ends` on.
    """
    lanes = tl.arange(0, BLOCK_DIM)
    used = _visible(keys, first_visible, end_key, WINDOW)[:, None]
    if HEAD_DIM == BLOCK_DIM:
        key_tile = tl.load(key_pointers)
    else:
        used = used & (lanes < HEAD_DIM)[None, :]
        key_tile = tl.load(key_pointers, mask=(lanes < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(query_tile, tl.trans(key_tile.to(query_tile.dtype)), input_precision=PRECISION)
    visible = _visible(keys[None, :], first_visible, end_key, WINDOW)
    if MAX_QUERIES > 1:
        visible = visible & _visible(keys[None, :], row_ends[:, None] - WINDOW, row_ends[:, None], WINDOW)
    weights, decay, new_max = weigh(scores, visible, row_max, scale_log2, SOFTCAP)
    sums = sums * decay[:, None] + weights
    # A weight of 0 does not cancel NaN, so values of unused slots must not be loaded.
    value_tile = tl.load(key_pointers + VALUE_OFFSET, mask=used, other=0.0).to(query_tile.dtype)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=PRECISION)
    return accumulator, sums, new_max


@triton.jit
def _write_item(
    accumulator, sums, row_max, value_scale, sinks, output, split_outputs, split_lse, row, part, splits, queries,
    first_head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
):  # fmt: skip
    """Write an item's normalized result: to the output if it is the row's only split, else to the partial results."""
    rows, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DIM)
    query, head = _query_and_head(rows, GROUP, MAX_QUERIES)
    heads = first_head + head
    is_row = rows < GROUP * queries
    owned = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
    row_sum = tl.sum(sums, axis=1)
    if sinks is not None:
        row_sum = tl.where(splits == 1, with_sinks(row_sum, row_max, sinks, heads, is_row), row_sum)
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    attended = accumulator * (1.0 / divisor)[:, None]
    if value_scale is not None:
        attended *= value_scale
    if splits == 1:
        write = ((row.to(tl.int64) + query) * num_heads + heads)[:, None] * HEAD_DIM + lanes[None, :]
        tl.store(output + write, attended.to(output.dtype.element_ty), mask=owned)
    else:
        place = (tl.cast(part, tl.int64) * MAX_QUERIES + query) * num_heads + heads
        tl.store(split_outputs + place[:, None] * HEAD_DIM + lanes[None, :], attended, mask=owned)
        tl.store(split_lse + place, row_max + tl.log2(divisor), mask=is_row)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query, key_cache, block_tables, output, items, num_items, split_outputs, split_lse, scale_log2, value_scale, sinks,
    query_token_stride, query_head_stride, cache_block_stride, cache_head_stride, cache_slot_stride, table_stride,
    VALUE_OFFSET: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ITEM_FIELDS: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MAX_QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run program (KV head, share of the items). Heads vary fastest because they share a block."""
    kv_head, part = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    shares = tl.num_programs(0) // NUM_KV_HEADS
    count = tl.load(num_items)
    num_tiles = _count_tiles(items, count, part, shares, BLOCK_N, ITEM_FIELDS, 64)
    # Items and block ids are loaded one iteration before use. Loaded in their own iteration, the loads of keys and
    # values would depend on a load, and the pipeliner would keep fewer tiles in flight.
    sequence, row, key, end_key, splits, first_visible, queries, seq_len = _load_item(
        items, part, count, ITEM_FIELDS, WINDOW, MAX_QUERIES
    )
    next_sequence, next_row, next_key, next_end_key, next_splits, next_visible, next_queries, next_len = _load_item(
        items, part + shares, count, ITEM_FIELDS, WINDOW, MAX_QUERIES
    )
    rows, tile, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DIM)
    row_query, head = _query_and_head(rows, GROUP, MAX_QUERIES)
    heads = kv_head * GROUP + head
    query_head = query + heads[:, None] * query_head_stride + lanes[None, :]
    if MAX_QUERIES > 1:
        query_head += row_query[:, None].to(tl.int64) * query_token_stride
    # A tile starts at a multiple of BLOCK_N, so a key's slot in its block is that of its lane.
    slots = tile % BLOCK_SIZE * cache_slot_stride
    key_head = key_cache + tl.cast(kv_head, tl.int64) * cache_head_stride + slots[:, None] + lanes[None, :]
    block_table = block_tables + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE
    block_ids = tl.load(
        block_table + tile // BLOCK_SIZE, mask=_visible(key + tile, first_visible, end_key, WINDOW), other=0
    )
    # Unsigned 32 x 32 -> 64 bits is one instruction. Offsets exceed int32 from block 2048 of an 8B model.
    block_stride = tl.cast(cache_block_stride, tl.uint32).to(tl.uint64)
    # Only the plan and the block tables, which are made once per step, were read before this wait (see attend_decode).
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    accumulator = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    # Summed over keys only at the end of an item: a sum across a program's warps costs two barriers.
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for _ in tl.range(0, num_tiles, num_stages=NUM_STAGES):
        keys = key + tile
        owned = (rows < GROUP * queries)[:, None] & (lanes < HEAD_DIM)[None, :]
        query_tile = tl.load(query_head + row.to(tl.int64) * query_token_stride, mask=owned, other=0.0)
        query_tile = query_operand(query_tile, key_cache)
        key_pointers = key_head + (block_ids.to(tl.uint32).to(tl.uint64) * block_stride)[:, None]
        if BLOCK_SIZE > BLOCK_N:
            key_pointers += key % BLOCK_SIZE * cache_slot_stride
        accumulator, sums, row_max = _attend_tile(
            query_tile, key_pointers, keys, first_visible, end_key, seq_len - queries + 1 + row_query, accumulator,
            sums, row_max, scale_log2, VALUE_OFFSET, HEAD_DIM, BLOCK_DIM, PRECISION, WINDOW, SOFTCAP, MAX_QUERIES,
        )  # fmt: skip
        is_last = key + BLOCK_N >= end_key
        if is_last:
            _write_item(
                accumulator, sums, row_max, value_scale, sinks, output, split_outputs, split_lse, row, part, splits,
                queries, kv_head * GROUP, NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_M, MAX_QUERIES,
            )  # fmt: skip
            accumulator = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        part = tl.where(is_last, part + shares, part)
        sequence, row = tl.where(is_last, next_sequence, sequence), tl.where(is_last, next_row, row)
        key, end_key = tl.where(is_last, next_key, key + BLOCK_N), tl.where(is_last, next_end_key, end_key)
        splits = tl.where(is_last, next_splits, splits)
        if WINDOW > 0:
            first_visible = tl.where(is_last, next_visible, first_visible)
        if MAX_QUERIES > 1:
            queries, seq_len = tl.where(is_last, next_queries, queries), tl.where(is_last, next_len, seq_len)
        block_table = block_tables + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE
        block_ids = tl.load(
            block_table + tile // BLOCK_SIZE, mask=_visible(key + tile, first_visible, end_key, WINDOW), other=0
        )
        next_sequence, next_row, next_key, next_end_key, next_splits, next_visible, next_queries, next_len = _load_item(
            items, part + shares, count, ITEM_FIELDS, WINDOW, MAX_QUERIES
        )


@triton.jit
def combine_splits_kernel(
    split_outputs, split_lse, sequence_items, query_start_loc, sinks, output,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, MAX_QUERIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query, in ascending order, for program (GROUP query heads, sequence, query)."""
    first_head, sequence, query = tl.program_id(0) * GROUP, tl.program_id(1), tl.program_id(2)
    first_item = tl.load(sequence_items + sequence * 2)
    num_splits = tl.load(sequence_items + sequence * 2 + 1)
    row = tl.load(query_start_loc + sequence).to(tl.int64) + query
    if MAX_QUERIES > 1:
        num_splits = tl.where(row < tl.load(query_start_loc + sequence + 1), num_splits, 0)
    group, lanes = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    owned = (group < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if num_splits > 1:
        combined = tl.zeros([BLOCK_GROUP, BLOCK_DIM], dtype=tl.float32)
        total = tl.zeros([BLOCK_GROUP], dtype=tl.float32)
        maximum = tl.full([BLOCK_GROUP], float("-inf"), dtype=tl.float32)
        for first_split in range(0, num_splits, BLOCK_SPLITS):
            splits = first_split + tl.arange(0, BLOCK_SPLITS)
            inside = (splits < num_splits)[:, None] & (group < GROUP)[None, :]
            places = (first_item + splits) * MAX_QUERIES + query
            places = places[:, None] * NUM_HEADS + first_head + group[None, :]
            lse = tl.load(split_lse + places, mask=inside, other=float("-inf"))
            read = places.to(tl.int64)[:, :, None] * HEAD_DIM + lanes[None, None, :]
            parts = tl.load(split_outputs + read, mask=inside[:, :, None] & owned[None, :, :], other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
            shift = tl.where(group < GROUP, new_maximum, 0.0)
            weights, decay = tl.exp2(lse - shift[None, :]), tl.exp2(maximum - shift)
            combined = combined * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
            total = total * decay + tl.sum(weights, axis=0)
            maximum = new_maximum
        total = with_sinks(total, maximum, sinks, first_head + group, group < GROUP)
        combined = combined / tl.where(group < GROUP, total, 1.0)[:, None]
        write = (row * NUM_HEADS + first_head + group)[:, None] * HEAD_DIM + lanes[None, :]
        tl.store(output + write, combined.to(output.dtype.element_ty), mask=owned)


def attend_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    output: Tensor,
    scale: float,
    may_start_early: bool,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Write the output rows of the sequences in `plan`.

    Args:
        query: [T, Hq, D].
        key_cache: [N, Hkv, BS, D].
        value_cache: [N, Hkv, BS, D], with the strides of key_cache.
        block_tables: [S, B], int32.
        plan: From plan_decode(), with the window of `rules`.
        output: [T, Hq, D], contiguous.
        scale: Factor of the scores.
        may_start_early: Read the plan and the block tables while the previous kernel still runs. They must be complete
            then, which any kernel launched without dependence between them and this one ensures.
        value_scale: Factor of e4m3 values; None for other caches.
        rules: Window, softcap and sinks.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_heads, num_sequences = query.shape[1], plan.sequence_items.shape[0]
    group = num_heads // num_kv_heads
    config = decode_config(query.dtype, head_dim, value_scale is not None and query.dtype != torch.float32)
    block_dim = max(64, triton.next_power_of_2(head_dim))
    launch = dependent_launch(query) if may_start_early else {"DEPENDENT": False}
    max_items = plan.items.shape[0]
    shares = max(1, min(max_items, PROGRAMS_PER_SM * num_multiprocessors(query.device) // num_kv_heads))
    decode_kernel[(shares * num_kv_heads,)](
        query,
        key_cache,
        block_tables,
        output,
        plan.items,
        plan.num_items,
        plan.split_outputs,
        plan.split_lse,
        scale * LOG2_E,
        value_scale,
        rules.sinks,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        VALUE_OFFSET=value_cache.storage_offset() - key_cache.storage_offset(),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group * plan.max_queries)),
        BLOCK_N=config.block_n,
        ITEM_FIELDS=ITEM_FIELDS,
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        NUM_STAGES=config.num_stages,
        WINDOW=rules.window,
        SOFTCAP=rules.softcap,
        MAX_QUERIES=plan.max_queries,
        num_warps=config.num_warps,
        **launch,
    )
    if max_items > num_sequences:
        combine_splits_kernel[(num_kv_heads, num_sequences, plan.max_queries)](
            plan.split_outputs,
            plan.split_lse,
            plan.sequence_items,
            plan.query_start_loc,
            rules.sinks,
            output,
            NUM_HEADS=num_heads,
            GROUP=group,
            BLOCK_GROUP=triton.next_power_of_2(group),
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            BLOCK_SPLITS=SPLITS_COMBINED_AT_ONCE,
            MAX_QUERIES=plan.max_queries,
            num_warps=COMBINE_WARPS,
            **launch,
        )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of SMs; 1 without a GPU (interpreter, compilation for a missing device)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
