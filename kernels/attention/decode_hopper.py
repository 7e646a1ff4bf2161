"""Gluon kernel for paged attention of sequences with one new token or few on Hopper. Contract: paged_attention.py.

A program is one warp with one KV head and a share of the plan's tiles. TMA fills its ring of NUM_STAGES tiles in shared
memory, one block at a time. A single warp needs no barrier; several warps per SM hide each other's latency and keep
190 KiB of keys and values in flight. The last program to finish a piece of a row joins its splits in ascending order.
e4m3 caches are read as 16-bit pairs with PARTS 2 (head_parts.py). Gluon has no interpreter.
"""
# The kernel is one function (ADR 0108).
# ruff: noqa: C901, PLR0912, PLR0915

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.decode_shares import SharePlan
from kernels.attention.head_parts import load_query, normalized, operands, query_and_head, store_parts, zeros
from kernels.attention.online_softmax import LOG2_E
from kernels.attention.online_softmax_gluon import weigh, with_sinks
from kernels.attention.pool_rows import PoolRows
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.dependent_launch import dependent_launch


@gluon.jit
def _hidden_tiles(seq_len, queries, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Return the number of tiles completely before all windows; a row's first tile has this number."""
    return gl.maximum(seq_len - (queries - 1) - WINDOW, 0) // TILE if WINDOW > 0 else 0


@gluon.jit
def _load_row(rows, index, ROW_FIELDS: gl.constexpr):
    """Return (sequence, row of query and output, keys, tiles before it)."""
    row = rows + index * ROW_FIELDS
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)


@gluon.jit
def _load_queries(rows, index, ROW_FIELDS: gl.constexpr, MAX_QUERIES: gl.constexpr):
    return gl.load(rows + index * ROW_FIELDS + 4) if MAX_QUERIES > 1 else 1


@gluon.jit
def _share_of(tile, long, short, LONG_SHARES: gl.constexpr):
    """Return the share that contains a tile."""
    long_end = long * LONG_SHARES
    return gl.where(tile < long_end, tile // long, LONG_SHARES + gl.maximum(tile - long_end, 0) // short)


@gluon.jit
def _fill(
    pool, ring, barriers, step, block_table, first_key, seq_len, queries, head_row, block_rows, value_rows,
    TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, WIDTH: gl.constexpr, NUM_STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Request a tile of keys and values as boxes [BOX, 64] of [keys and values, halves, TILE, 64]."""
    COLUMNS: gl.constexpr = 64 if WIDTH > 64 else WIDTH
    HALVES: gl.constexpr = WIDTH // COLUMNS
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BOXES: gl.constexpr = TILE // BOX
    stage = step % NUM_STAGES
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, 2 * TILE * WIDTH * 2)
    for box in gl.static_range(BOXES):
        key = first_key + box * BOX
        # Outside the sequence or its window block 0 is read; its scores and values are masked.
        used = key < seq_len
        if WINDOW > 0:
            used = used & (key + BOX > seq_len - (queries - 1) - WINDOW)
        block = gl.load(block_table + key // BLOCK_SIZE, mask=used, other=0)
        row = block * block_rows + head_row
        if BLOCK_SIZE > TILE:
            row += key % BLOCK_SIZE
        for half in gl.static_range(HALVES):
            keys_place = ((stage * 2) * HALVES + half) * BOXES + box
            values_place = ((stage * 2 + 1) * HALVES + half) * BOXES + box
            tma.async_copy_global_to_shared(pool, [row, half * COLUMNS], barrier, ring.index(keys_place))
            tma.async_copy_global_to_shared(pool, [row + value_rows, half * COLUMNS], barrier, ring.index(values_place))


@gluon.jit
def _combine_splits(
    output, splits, split_lse, first_share, num_splits, row, query, first_head, sinks,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    MAX_QUERIES: gl.constexpr,
):  # fmt: skip
    """Combine the splits of a query, weighted by their sums, in ascending order."""
    AT_ONCE: gl.constexpr = 16 // BLOCK_GROUP
    layout: gl.constexpr = gl.BlockedLayout([1, 1, HEAD_DIM // 32], [1, 1, 32], [1, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    group_layout: gl.constexpr = gl.SliceLayout(0, flat)
    ahead = gl.arange(0, AT_ONCE, gl.SliceLayout(1, flat))
    group = gl.arange(0, BLOCK_GROUP, group_layout)
    lanes = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    combined = gl.zeros([BLOCK_GROUP, HEAD_DIM], gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([BLOCK_GROUP], gl.float32, group_layout)
    maximum = gl.full([BLOCK_GROUP], float("-inf"), gl.float32, group_layout)
    for first in range(0, num_splits, AT_ONCE):
        split = first + ahead
        # A row's first split is the second slot of its share; later splits are the first slot of theirs.
        place = (first_share + split) * 2 + gl.where(split == 0, 1, 0)
        if MAX_QUERIES > 1:
            place = place * MAX_QUERIES + query
        place = gl.expand_dims(place, 1) * NUM_HEADS + first_head + gl.expand_dims(group, 0)
        inside = gl.expand_dims(split < num_splits, 1) & gl.expand_dims(group < GROUP, 0)
        lse = gl.load(split_lse + place, mask=inside, other=float("-inf"))
        read = gl.expand_dims(place * HEAD_DIM, 2) + gl.expand_dims(gl.expand_dims(lanes, 0), 0)
        parts = gl.load(splits + read, mask=gl.expand_dims(inside, 2), other=0.0)
        new_maximum = gl.maximum(maximum, gl.max(lse, axis=0))
        shift = gl.where(group < GROUP, new_maximum, 0.0)
        if MAX_QUERIES > 1:  # a query may see no key of the first splits
            shift = gl.where(new_maximum == float("-inf"), 0.0, shift)
        weights = gl.exp2(lse - gl.expand_dims(shift, 0))
        decay = gl.exp2(maximum - shift)
        combined = combined * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(0, layout))), 1)
        combined += gl.sum(parts * gl.expand_dims(weights, 2), axis=0)
        total = total * decay + gl.sum(weights, axis=0)
        maximum = new_maximum
    total = with_sinks(total, maximum, sinks, first_head + group, group < GROUP)
    divisor = gl.where(group < GROUP, total, 1.0)
    combined = combined / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, gl.SliceLayout(0, layout))), 1)
    heads = gl.convert_layout(group, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    row = row.to(gl.int64) + query
    write = (row * NUM_HEADS + first_head + gl.expand_dims(heads, 1)) * HEAD_DIM + gl.expand_dims(lanes, 0)
    gl.store(output + write, combined.to(output.dtype.element_ty), mask=gl.expand_dims(heads < GROUP, 1))


@gluon.jit
def _write_zeros(
    output, rows, num_empty, num_sequences, share, num_shares, kv_head,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROW_FIELDS: gl.constexpr,
):  # fmt: skip
    """Write zeros to the rows without keys, which are at the end of the list."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lanes = gl.arange(0, HEAD_DIM, layout)
    for index in range(share, num_empty, num_shares):
        row = gl.load(rows + (num_sequences - 1 - index) * ROW_FIELDS + 1)
        for head in range(GROUP):
            write = (row.to(gl.int64) * NUM_HEADS + kv_head * GROUP + head) * HEAD_DIM
            gl.store(output + write + lanes, gl.zeros([HEAD_DIM], output.dtype.element_ty, layout))


@gluon.jit
def _clear_unused(value_tile, first_used, end_used, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """Zero the values of unused slots, because a weight of 0 does not cancel NaN.

    It works on shared memory so that it is a branch. On registers the compiler emits selects, which every tile would
    execute.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    slots = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    used = slots < end_used
    if WINDOW > 0:
        used = used & (slots >= first_used)
    values = value_tile.load(layout)
    value_tile.store(gl.where(used[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend_tile(
    query_tile, key_tile, value_tile, tile, seq_len, queries, accumulator, row_sum, row_max, scale_log2,
    TILE: gl.constexpr, PARTS: gl.constexpr, mma: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    GROUP: gl.constexpr, MAX_QUERIES: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values [TILE, WIDTH] in shared memory to the running softmax (row_max in log2 units)."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    keys = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, mma))
    scores = gl.zeros([16, TILE], gl.float32, mma)
    key_parts = operands(key_tile.permute((1, 0)), right, PARTS)
    scores = mma_v2(query_tile[0], key_parts[0], scores)
    if PARTS == 2:
        scores = mma_v2(query_tile[1], key_parts[1], scores)
    if MAX_QUERIES > 1:
        query, _ = query_and_head(gl.arange(0, 16, gl.SliceLayout(1, mma)), GROUP, MAX_QUERIES)
        row_ends = gl.minimum(seq_len - queries + 1 + query, seq_len)[:, None]
        visible = keys[None, :] < row_ends
        if WINDOW > 0:
            visible = visible & (keys[None, :] >= row_ends - WINDOW)
    else:
        visible = keys < seq_len
        if WINDOW > 0:
            visible = visible & (keys >= seq_len - WINDOW)
        visible = visible[None, :]
    weights, decay, new_max = weigh(scores, visible, row_max, scale_log2, SOFTCAP, MAX_QUERIES == 1)
    row_sum = row_sum * decay + gl.sum(weights, axis=1)
    has_unused = tile * TILE + TILE > seq_len
    if WINDOW > 0:
        has_unused = has_unused | (tile * TILE < seq_len - (queries - 1) - WINDOW)
    if has_unused:
        first_used = seq_len - (queries - 1) - WINDOW - tile * TILE
        _clear_unused(value_tile, first_used, seq_len - tile * TILE, TILE, WINDOW)
    value_parts = operands(value_tile, right, PARTS)
    weights = gl.convert_layout(weights.to(value_parts[0].dtype), left)
    even = mma_v2(weights, value_parts[0], accumulator[0] * decay[:, None])
    odd = mma_v2(weights, value_parts[1], accumulator[1] * decay[:, None]) if PARTS == 2 else even
    return (even, odd) if PARTS == 2 else (even,), row_sum, new_max


@gluon.jit
def _write_split(
    accumulator, row_sum, row_max, value_scale, sinks, output, splits, split_lse, arrivals, long, short, share, row,
    seq_len, queries, first_tile, split_tile, is_last, kv_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PARTS: gl.constexpr, TILE: gl.constexpr, LONG_SHARES: gl.constexpr, mma: gl.constexpr, WINDOW: gl.constexpr,
    MAX_QUERIES: gl.constexpr,
):  # fmt: skip
    """Write the normalized result to the output, or to the splits if the share has only a part of the row.

    The program that arrives last joins the splits.
    """
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    rows = gl.arange(0, 16, gl.SliceLayout(1, mma))
    query, head = query_and_head(rows, GROUP, MAX_QUERIES)
    heads, is_row = kv_head * GROUP + head, rows < GROUP * queries
    divisor = row_sum
    if sinks is not None:
        with_sink = with_sinks(row_sum, row_max, sinks, heads, is_row)
        divisor = gl.where(is_last & (split_tile == 0), with_sink, row_sum)
    if MAX_QUERIES > 1:  # a query may see no key of the share
        divisor = gl.where(divisor == 0.0, 1.0, divisor)
    even = normalized(accumulator[0], divisor, value_scale)
    attended = (even, normalized(accumulator[1], divisor, value_scale)) if PARTS == 2 else (even,)
    if is_last & (split_tile == 0):
        start = ((row.to(gl.int64) + query) * NUM_HEADS + heads)[:, None] * HEAD_DIM
        store_parts(attended, output, start, is_row, HEAD_DIM, PARTS, mma)
    else:
        # A row that started before the share uses the share's first slot, one that starts in it the second.
        slot = share * 2 + gl.where(split_tile == 0, 1, 0)
        place = (slot * MAX_QUERIES + query) * NUM_HEADS + heads
        store_parts(attended, splits + place[:, None] * HEAD_DIM, None, is_row, HEAD_DIM, PARTS, mma)
        gl.store(split_lse + place, row_max + gl.log2(row_sum), mask=is_row)
        first_share = _share_of(first_tile, long, short, LONG_SHARES)
        last_tile = first_tile + (seq_len - 1) // TILE - _hidden_tiles(seq_len, queries, TILE, WINDOW)
        last_share = _share_of(last_tile, long, short, LONG_SHARES)
        arrival = arrivals + first_share * NUM_KV_HEADS + kv_head
        gl.thread_barrier()
        if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == last_share - first_share:
            gl.store(arrival, 0)
            if MAX_QUERIES > 1:
                for number in range(queries):
                    _combine_splits(
                        output, splits, split_lse, first_share, last_share - first_share + 1, row, number,
                        kv_head * GROUP, sinks, NUM_HEADS, GROUP, BLOCK_GROUP, HEAD_DIM, MAX_QUERIES,
                    )  # fmt: skip
            else:
                _combine_splits(
                    output, splits, split_lse, first_share, last_share - first_share + 1, row, 0, kv_head * GROUP,
                    sinks, NUM_HEADS, GROUP, BLOCK_GROUP, HEAD_DIM, MAX_QUERIES,
                )  # fmt: skip


@gluon.jit
def _share_bounds(counts, share, LONG_SHARES: gl.constexpr):
    """Return (first tile, number of tiles, tiles of a long share, tiles of a short share)."""
    num_tiles, long, short = gl.load(counts + 2), gl.load(counts + 3), gl.load(counts + 4)
    is_long = share < LONG_SHARES
    start = gl.where(is_long, share * long, LONG_SHARES * long + (share - LONG_SHARES) * short)
    return start, gl.maximum(gl.minimum(gl.where(is_long, long, short), num_tiles - start), 0), long, short


@gluon.jit(do_not_specialize=["table_stride", "num_sequences"])
# A warp has two cursors: the next tile to request and the tile to attend to. Triton has no structure to pass them in.
def decode_hopper_kernel(
    pool, query, block_tables, output, rows, counts, share_rows, arrivals, splits, split_lse, scale_log2, value_scale,
    sinks, query_token_stride, query_head_stride, block_rows, head_rows, value_rows, table_stride, num_sequences,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr,
    ROW_FIELDS: gl.constexpr, LONG_SHARES: gl.constexpr, NEW_KEYS: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, MAX_QUERIES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Run program (KV head, share). Heads vary fastest because they share a block."""
    if DEPENDENT:
        gdc_launch_dependents()
    WIDTH: gl.constexpr = HEAD_DIM // PARTS  # of the stored head, in 16-bit elements
    COLUMNS: gl.constexpr = 64 if WIDTH > 64 else WIDTH
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < TILE else TILE
    BOXES: gl.constexpr = NUM_STAGES * 2 * (WIDTH // COLUMNS) * (TILE // BOX)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    rows_layout: gl.constexpr = gl.SliceLayout(1, mma)
    ring = gl.allocate_shared_memory(pool.dtype, [BOXES, BOX, COLUMNS], pool.layout)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    tiles = ring._reinterpret(pool.dtype, [NUM_STAGES * 2, TILE, WIDTH], tile_layout)
    barriers = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(barriers.index(early), count=1)
    kv_head, share = gl.program_id(0) % NUM_KV_HEADS, gl.program_id(0) // NUM_KV_HEADS
    start, num_steps, long, short = _share_bounds(counts, share, LONG_SHARES)
    index = gl.load(share_rows + share, mask=num_steps > 0, other=0)
    sequence, row, seq_len, first_tile = _load_row(rows, index, ROW_FIELDS)
    row = gl.where(num_steps > 0, row, 0)
    queries = _load_queries(rows, index, ROW_FIELDS, MAX_QUERIES)
    if MAX_QUERIES > 1:
        queries = gl.where(num_steps > 0, queries, 1)
    tile = start - first_tile
    split_tile = tile
    if WINDOW > 0:
        tile += _hidden_tiles(seq_len, queries, TILE, WINDOW)
    head_row = kv_head * head_rows
    # Cursor of the next request.
    next_index, next_tile, next_len, next_queries = index, tile, seq_len, queries
    next_table = block_tables + sequence.to(gl.int64) * table_stride
    asked = 0
    if DEPENDENT:
        # Before the wait, only the plan and the block tables are read, which are made once per step. In a decode-only
        # batch all keys except the last NEW_KEYS of each sequence are older than the step.
        if NEW_KEYS > 0:
            old_tiles = (seq_len - NEW_KEYS) // TILE
            asked = gl.maximum(gl.minimum(gl.minimum(num_steps, NUM_STAGES), old_tiles - tile), 0)
            for step in range(asked):
                _fill(
                    pool, ring, barriers, step, next_table, next_tile * TILE, next_len, next_queries, head_row,
                    block_rows, value_rows, TILE, BLOCK_SIZE, WIDTH, NUM_STAGES, WINDOW,
                )  # fmt: skip
                next_tile += 1
        gdc_wait()
    place = (row, query_token_stride, kv_head, query_head_stride)
    query_tile = load_query(query, place, queries, GROUP, HEAD_DIM, PARTS, MAX_QUERIES, mma)
    accumulator = zeros(WIDTH, PARTS, mma)
    row_sum = gl.zeros([16], gl.float32, rows_layout)
    row_max = gl.full([16], float("-inf"), gl.float32, rows_layout)
    # Negative steps only fill the ring.
    for step in range(asked - NUM_STAGES, num_steps):
        ahead = step + NUM_STAGES
        if (ahead < num_steps) & (next_tile * TILE >= next_len):
            next_index += 1
            next_sequence, _, next_len, _ = _load_row(rows, next_index, ROW_FIELDS)
            next_table = block_tables + next_sequence.to(gl.int64) * table_stride
            if MAX_QUERIES > 1:
                next_queries = _load_queries(rows, next_index, ROW_FIELDS, MAX_QUERIES)
            next_tile = _hidden_tiles(next_len, next_queries, TILE, WINDOW)
        if step >= 0:
            stage = step % NUM_STAGES
            mbarrier.wait(barriers.index(stage), step // NUM_STAGES & 1)
            accumulator, row_sum, row_max = _attend_tile(
                query_tile, tiles.index(stage * 2), tiles.index(stage * 2 + 1), tile, seq_len, queries, accumulator,
                row_sum, row_max, scale_log2, TILE, PARTS, mma, WINDOW, SOFTCAP, GROUP, MAX_QUERIES,
            )  # fmt: skip
        if ahead < num_steps:
            gl.thread_barrier()
            _fill(
                pool, ring, barriers, ahead, next_table, next_tile * TILE, next_len, next_queries, head_row,
                block_rows, value_rows, TILE, BLOCK_SIZE, WIDTH, NUM_STAGES, WINDOW,
            )  # fmt: skip
            next_tile += 1
        is_last = tile * TILE + TILE >= seq_len
        if (step >= 0) & (is_last | (step == num_steps - 1)):
            _write_split(
                accumulator, row_sum, row_max, value_scale, sinks, output, splits, split_lse, arrivals, long, short,
                share, row, seq_len, queries, first_tile, split_tile, is_last, kv_head,
                NUM_KV_HEADS, GROUP, BLOCK_GROUP, HEAD_DIM, PARTS, TILE, LONG_SHARES, mma, WINDOW, MAX_QUERIES,
            )  # fmt: skip
            if step < num_steps - 1:
                index += 1
                _, row, seq_len, first_tile = _load_row(rows, index, ROW_FIELDS)
                if MAX_QUERIES > 1:
                    queries = _load_queries(rows, index, ROW_FIELDS, MAX_QUERIES)
                place = (row, query_token_stride, kv_head, query_head_stride)
                query_tile = load_query(query, place, queries, GROUP, HEAD_DIM, PARTS, MAX_QUERIES, mma)
                accumulator = zeros(WIDTH, PARTS, mma)
                row_sum = gl.zeros([16], gl.float32, rows_layout)
                row_max = gl.full([16], float("-inf"), gl.float32, rows_layout)
                tile = _hidden_tiles(seq_len, queries, TILE, WINDOW) - 1
                split_tile = 0
        if step >= 0:
            tile += 1
    _write_zeros(
        output, rows, gl.load(counts + 1), num_sequences, share, gl.num_programs(0) // NUM_KV_HEADS, kv_head,
        NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, ROW_FIELDS,
    )  # fmt: skip


def attend_decode_hopper(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    plan: SharePlan,
    output: Tensor,
    scale: float,
    may_start_early: bool,
    new_keys: int,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Write the output rows of the sequences in `plan`.

    Args:
        query: [T, Hq, D].
        key_cache: [N, Hkv, BS, D], accepted by pool_rows.supports_tma().
        value_cache: [N, Hkv, BS, D], with the strides of key_cache.
        block_tables: [S, B], int32.
        plan: From plan_shares(), with the window of `rules`.
        output: [T, Hq, D], contiguous.
        scale: Factor of the scores.
        may_start_early: Read the plan and the block tables while the previous kernel still runs. They must be complete
            then, which any kernel launched without dependence between them and this one ensures.
        new_keys: All but so many of each sequence's last keys and values are complete, too; 0: not known.
        value_scale: Factor of e4m3 values; None for other caches.
        rules: Window, softcap and sinks.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    is_fp8 = value_scale is not None
    pool = PoolRows(
        *((cache.view(torch.int16) for cache in (key_cache, value_cache)) if is_fp8 else (key_cache, value_cache))
    )
    launch = dependent_launch(query) if may_start_early else {"DEPENDENT": False}
    decode_hopper_kernel[(plan.num_shares * num_kv_heads,)](
        pool.boxes(min(block_size, plan.tile)),
        query,
        block_tables,
        output,
        plan.rows,
        plan.counts,
        plan.share_rows,
        plan.arrivals,
        plan.splits,
        plan.split_lse,
        scale * LOG2_E,
        value_scale,
        rules.sinks,
        *query.stride()[:2],
        pool.block_rows,
        pool.head_rows,
        pool.value_rows,
        block_tables.stride(0),
        len(plan.rows),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_GROUP=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        PARTS=2 if is_fp8 else 1,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        NUM_STAGES=plan.num_stages,
        ROW_FIELDS=plan.rows.shape[1],
        LONG_SHARES=plan.num_long_shares,
        NEW_KEYS=new_keys,
        WINDOW=rules.window,
        SOFTCAP=rules.softcap,
        MAX_QUERIES=plan.max_queries,
        num_warps=1,
        **launch,
    )
