"""Gluon kernel for paged attention of sequences with several new tokens on Hopper. paged_attention.py has the contract.

A program has a tile of 128 rows, (token, query head) pairs of one KV head. One warp requests keys and values by TMA,
block by block, into rings of tiles. Two groups of four warps have 64 rows each and start the scores of the next tile
before the softmax of the current one, so the tensor cores do not wait for exponentials. Key tiles lie at absolute
positions (see prefill.py). With a window, table, length and positions start at the first visible tile.
"""
# A kernel is one function (ADR 0108).
# ruff: noqa: PLR0915

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.decode import num_multiprocessors
from kernels.attention.head_parts import query_operand
from kernels.attention.online_softmax import LOG2_E
from kernels.attention.online_softmax_gluon import weigh, with_sinks
from kernels.attention.pool_rows import PoolRows
from kernels.attention.score_rules import NO_RULES, ScoreRules

# Tiles of 64 keys reach 526 TFLOP/s at 8192 tokens, rings of three 559, this configuration 638.
BLOCK_M, BLOCK_N, NUM_STAGES = 128, 128, 2


@gluon.jit
def _is_used(key, seq_len, first_visible, BOX: gl.constexpr, WINDOW: gl.constexpr):
    """Return whether a row sees one of the BOX keys from `key` on."""
    used = key < seq_len
    if WINDOW > 0:
        used = used & (key + BOX > first_visible)
    return used


@gluon.jit
def _produce(
    pool, key_ring, value_ring, full_keys, full_values, empty_keys, empty_values, block_table, num_tiles, seq_len,
    first_visible, head_row, block_rows, value_rows, row_behind,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, HALVES: gl.constexpr, NUM_STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    BOXES: gl.constexpr = BLOCK_N // BOX
    for tile in range(num_tiles):
        stage, phase = tile % NUM_STAGES, tile // NUM_STAGES & 1
        mbarrier.wait(empty_keys.index(stage), phase ^ 1)
        mbarrier.expect(full_keys.index(stage), BLOCK_N * HALVES * 128)
        for box in gl.static_range(BOXES):
            key = tile * BLOCK_N + box * BOX
            used = _is_used(key, seq_len, first_visible, BOX, WINDOW)
            block = gl.load(block_table + key // BLOCK_SIZE, mask=used, other=0)
            # Rows after the end of the pool arrive as zeros.
            row = gl.where(used, block * block_rows + head_row, row_behind)
            for half in gl.static_range(HALVES):
                place = key_ring.index((stage * HALVES + half) * BOXES + box)
                tma.async_copy_global_to_shared(pool, [row, half * 64], full_keys.index(stage), place)
        mbarrier.wait(empty_values.index(stage), phase ^ 1)
        mbarrier.expect(full_values.index(stage), BLOCK_N * HALVES * 128)
        for box in gl.static_range(BOXES):
            key = tile * BLOCK_N + box * BOX
            used = _is_used(key, seq_len, first_visible, BOX, WINDOW)
            block = gl.load(block_table + key // BLOCK_SIZE, mask=used, other=0)
            row = gl.where(used, block * block_rows + head_row + value_rows, row_behind)
            for half in gl.static_range(HALVES):
                place = value_ring.index((stage * HALVES + half) * BOXES + box)
                tma.async_copy_global_to_shared(pool, [row, half * 64], full_values.index(stage), place)


@gluon.jit
def _weigh(
    scores, row_max, row_sum, tile, row_positions, scale_log2, MASKED: gl.constexpr, mma: gl.constexpr,
    BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Return (weights of a tile, new maximum in log2 units, new sum, decay of the earlier sums)."""
    visible = None
    if MASKED:
        keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        visible = keys[None, :] <= row_positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > row_positions[:, None] - WINDOW)
    weights, decay, new_max = weigh(scores, visible, row_max, scale_log2, SOFTCAP, False)
    return weights, new_max, row_sum * decay + gl.sum(weights, axis=1), decay


@gluon.jit
def _step(
    query_tile, weights, accumulator, row_max, row_sum, keys, values, full_keys, full_values, empty_keys, empty_values,
    tile, row_positions, scale_log2, MASKED: gl.constexpr, mma: gl.constexpr, mma_out: gl.constexpr,
    left: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Compute the scores and weights of `tile` while the values of the previous tile are multiplied."""
    stage, before = tile % NUM_STAGES, (tile - 1) % NUM_STAGES
    mbarrier.wait(full_keys.index(stage), tile // NUM_STAGES & 1)
    none = gl.zeros([64, BLOCK_N], gl.float32, mma)
    scores = warpgroup_mma(query_tile, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(full_values.index(before), (tile - 1) // NUM_STAGES & 1)
    accumulator = warpgroup_mma(weights, values.index(before), accumulator, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(empty_keys.index(stage), count=1)
    new_weights, row_max, row_sum, decay = _weigh(
        scores, row_max, row_sum, tile, row_positions, scale_log2, MASKED, mma, BLOCK_N, WINDOW, SOFTCAP
    )
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
    mbarrier.arrive(empty_values.index(before), count=1)
    accumulator = accumulator * gl.convert_layout(decay, gl.SliceLayout(1, mma_out))[:, None]
    return gl.convert_layout(new_weights.to(weights.dtype), left), accumulator, row_max, row_sum


@gluon.jit
def _clear_unused(value_ring, stage, end, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr):
    """Zero the unused slots of a tile's last block, because a weight of 0 does not cancel NaN."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    BOXES: gl.constexpr = BLOCK_N // BOX
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    used = gl.arange(0, BOX, gl.SliceLayout(1, layout)) < end % BOX
    for half in gl.static_range(HALVES):
        place = value_ring.index((stage * HALVES + half) * BOXES + end // BOX)
        values = place.load(layout)
        place.store(gl.where(used[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _consume(
    which: gl.constexpr, query, output, key_ring, value_ring, full_keys, full_values, empty_keys, empty_values,
    scale_log2, value_scale, sinks, query_token_stride, query_head_stride, kv_head, first_row, first_token, query_len,
    seq_len, num_tiles, first_masked_tile,
    GROUP: gl.constexpr, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Attend for 64 rows of the tile."""
    HALVES: gl.constexpr = HEAD_DIM // 64
    TILE_TOKENS: gl.constexpr = BLOCK_M // GROUP
    mma_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left_scores: gl.constexpr = gl.DotOperandLayout(0, mma_scores, 2)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    keys = key_ring._reinterpret(key_ring.dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    values = value_ring._reinterpret(value_ring.dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], tile_layout)
    if num_tiles > 0:
        rows = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, left_scores))
        lanes = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, left_scores))
        tokens = first_token + rows // GROUP
        owned = ((rows < TILE_TOKENS * GROUP) & (tokens < query_len))[:, None] & (lanes < HEAD_DIM)[None, :]
        read = (first_row + tokens).to(gl.int64)[:, None] * query_token_stride
        read += ((kv_head * GROUP + rows % GROUP) * query_head_stride)[:, None] + lanes[None, :]
        query_tile = query_operand(gl.load(query + read, mask=owned, other=0.0), key_ring.dtype)
        score_rows = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma_scores))
        row_positions = gl.minimum(seq_len - query_len + first_token + score_rows // GROUP, seq_len - 1)
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, mma_scores))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, mma_scores))
        accumulator = gl.zeros([64, HEAD_DIM], gl.float32, mma)
        mbarrier.wait(full_keys.index(0), 0)
        scores = gl.zeros([64, BLOCK_N], gl.float32, mma_scores)
        scores = warpgroup_mma(query_tile, keys.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty_keys.index(0), count=1)
        weights, row_max, row_sum, _ = _weigh(
            scores, row_max, row_sum, 0, row_positions, scale_log2, True, mma_scores, BLOCK_N, WINDOW, SOFTCAP
        )
        weights = gl.convert_layout(weights.to(query_tile.dtype), left)
        first_plain_tile: gl.constexpr = 2 if WINDOW > 0 else 1
        if WINDOW > 0:
            # A tile has at most as many rows as keys, so only these tiles can be cut by the last row's window.
            for tile in range(1, gl.minimum(num_tiles, first_plain_tile)):
                weights, accumulator, row_max, row_sum = _step(
                    query_tile, weights, accumulator, row_max, row_sum, keys, values, full_keys, full_values,
                    empty_keys, empty_values, tile, row_positions, scale_log2, True, mma_scores, mma, left, BLOCK_N,
                    NUM_STAGES, WINDOW, SOFTCAP,
                )  # fmt: skip
        for tile in range(first_plain_tile, first_masked_tile):
            weights, accumulator, row_max, row_sum = _step(
                query_tile, weights, accumulator, row_max, row_sum, keys, values, full_keys, full_values, empty_keys,
                empty_values, tile, row_positions, scale_log2, False, mma_scores, mma, left, BLOCK_N, NUM_STAGES,
                WINDOW, SOFTCAP,
            )  # fmt: skip
        for tile in range(gl.maximum(first_masked_tile, first_plain_tile), num_tiles):
            weights, accumulator, row_max, row_sum = _step(
                query_tile, weights, accumulator, row_max, row_sum, keys, values, full_keys, full_values, empty_keys,
                empty_values, tile, row_positions, scale_log2, True, mma_scores, mma, left, BLOCK_N, NUM_STAGES,
                WINDOW, SOFTCAP,
            )  # fmt: skip
        last = num_tiles - 1
        mbarrier.wait(full_values.index(last % NUM_STAGES), last // NUM_STAGES & 1)
        if (seq_len < num_tiles * BLOCK_N) & (seq_len % BLOCK_SIZE > 0):
            _clear_unused(value_ring, last % NUM_STAGES, seq_len - last * BLOCK_N, BLOCK_SIZE, BLOCK_N, HALVES)
        accumulator = warpgroup_mma(weights, values.index(last % NUM_STAGES), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
        heads = kv_head * GROUP + score_rows % GROUP
        row_sum = with_sinks(row_sum, row_max, sinks, heads, heads >= 0)
        divisor = gl.convert_layout(gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, mma))
        attended = accumulator / divisor[:, None]
        if value_scale is not None:
            attended *= value_scale
        rows = which * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma))
        lanes = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, mma))
        tokens = first_token + rows // GROUP
        owned = ((rows < TILE_TOKENS * GROUP) & (tokens < query_len))[:, None] & (lanes < HEAD_DIM)[None, :]
        write = (first_row + tokens).to(gl.int64) * NUM_HEADS + kv_head * GROUP + rows % GROUP
        gl.store(output + write[:, None] * HEAD_DIM + lanes[None, :], attended.to(output.dtype.element_ty), mask=owned)


@gluon.jit
def _sequence_of_tile(query_start_loc, tile, num_sequences, TILE_TOKENS: gl.constexpr):
    """Return the sequence of a tile.

    Sequence s has the tiles from start // TILE_TOKENS + s on. This is an upper bound of its need that requires no plan
    from the host.
    """
    sequence, beyond = 0, num_sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if gl.load(query_start_loc + middle) // TILE_TOKENS + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    return sequence


@gluon.jit(do_not_specialize=["table_stride", "num_sequences", "row_behind", "heads_at_once"])
def prefill_hopper_kernel(
    pool, query, block_tables, query_start_loc, seq_lens, output, scale_log2, value_scale, sinks, query_token_stride,
    query_head_stride, block_rows, head_rows, value_rows, row_behind, table_stride, num_sequences, heads_at_once,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Run program (KV head of a tile of tokens)."""
    HALVES: gl.constexpr = HEAD_DIM // 64
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    TILE_TOKENS: gl.constexpr = BLOCK_M // GROUP
    PIECES: gl.constexpr = NUM_STAGES * HALVES * (BLOCK_N // BOX)
    key_ring = gl.allocate_shared_memory(pool.dtype, [PIECES, BOX, 64], pool.layout)
    value_ring = gl.allocate_shared_memory(pool.dtype, [PIECES, BOX, 64], pool.layout)
    full_keys = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_keys = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_values = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(NUM_STAGES):
        mbarrier.init(full_keys.index(early), count=1)
        mbarrier.init(full_values.index(early), count=1)
        mbarrier.init(empty_keys.index(early), count=2)
        mbarrier.init(empty_values.index(early), count=2)
    # Last tiles first: they see the most keys, and a long program that starts last would run alone.
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    group_programs = gl.num_programs(0) // NUM_KV_HEADS * heads_at_once
    place = program % group_programs
    kv_head, tile = program // group_programs * heads_at_once + place % heads_at_once, place // heads_at_once
    sequence = _sequence_of_tile(query_start_loc, tile, num_sequences, TILE_TOKENS)
    first_row = gl.load(query_start_loc + sequence)
    query_len = gl.load(query_start_loc + sequence + 1) - first_row
    first_token = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    seq_len = gl.load(seq_lens + sequence)
    first_position = seq_len - query_len + first_token
    first_visible = 0
    if WINDOW > 0:
        first_visible = gl.maximum(first_position - WINDOW + 1, 0)
        hidden = first_visible // BLOCK_N * BLOCK_N
        first_visible, first_position, seq_len = first_visible - hidden, first_position - hidden, seq_len - hidden
    end_key = gl.minimum(first_position + TILE_TOKENS, seq_len)
    first_masked_tile = gl.maximum(gl.minimum(first_position + 1, end_key), 0) // BLOCK_N
    num_tiles = gl.maximum((end_key + BLOCK_N - 1) // BLOCK_N, 1)
    # Sequences with one new token are left to the decode kernel.
    num_tiles = gl.where((query_len < 2) | (first_token >= query_len), 0, num_tiles)
    block_table = block_tables + sequence.to(gl.int64) * table_stride
    if WINDOW > 0:
        block_table += hidden // BLOCK_SIZE
    head_row = kv_head * head_rows
    gl.warp_specialize(
        [
            (_consume, (
                0, query, output, key_ring, value_ring, full_keys, full_values, empty_keys, empty_values, scale_log2,
                value_scale, sinks, query_token_stride, query_head_stride, kv_head, first_row, first_token, query_len,
                seq_len, num_tiles, first_masked_tile, GROUP, NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_M,
                BLOCK_N, NUM_STAGES, WINDOW, SOFTCAP,
            )),
            (_consume, (
                1, query, output, key_ring, value_ring, full_keys, full_values, empty_keys, empty_values, scale_log2,
                value_scale, sinks, query_token_stride, query_head_stride, kv_head, first_row, first_token, query_len,
                seq_len, num_tiles, first_masked_tile, GROUP, NUM_KV_HEADS * GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_M,
                BLOCK_N, NUM_STAGES, WINDOW, SOFTCAP,
            )),
            (_produce, (
                pool, key_ring, value_ring, full_keys, full_values, empty_keys, empty_values, block_table, num_tiles,
                seq_len, first_visible, head_row, block_rows, value_rows, row_behind, BLOCK_N, BLOCK_SIZE, HALVES,
                NUM_STAGES, WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def heads_at_once(num_kv_heads: int, max_tiles: int, num_multiprocessors: int) -> int:
    """Return the smallest number of heads whose tiles fill the device 1.5 times.

    The keys and values of one head, 17 MB at 32k tokens, stay in L2, those of eight do not (608 and 506 TFLOP/s). Short
    prompts have too few tiles for one head at a time (239 and 282 TFLOP/s).
    """
    divisors = (heads for heads in range(1, num_kv_heads) if num_kv_heads % heads == 0)
    return next((heads for heads in divisors if 2 * heads * max_tiles >= 3 * num_multiprocessors), num_kv_heads)


def attend_prefill_hopper(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    scale: float,
    value_scale: float | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Write the output rows of sequences with at least two new tokens.

    Args:
        query: [T, Hq, D]; may be bfloat16 with a float16 cache.
        key_cache: [N, Hkv, BS, D].
        value_cache: [N, Hkv, BS, D], with the strides of key_cache.
        block_tables: [S, B], int32.
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        output: [T, Hq, D], contiguous.
        scale: Factor of the scores.
        value_scale: Factor of the values; None: 1.
        rules: Window, softcap and sinks.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    num_tokens, num_heads = query.shape[:2]
    num_sequences, group = seq_lens.shape[0], num_heads // num_kv_heads
    pool = PoolRows(key_cache, value_cache)
    max_tiles = num_tokens // (BLOCK_M // group) + num_sequences
    prefill_hopper_kernel[(max_tiles * num_kv_heads,)](
        pool.boxes(min(block_size, BLOCK_N)),
        query,
        block_tables,
        query_start_loc,
        seq_lens,
        output,
        scale * LOG2_E,
        value_scale,
        rules.sinks,
        *query.stride()[:2],
        pool.block_rows,
        pool.head_rows,
        pool.value_rows,
        pool.num_rows,
        block_tables.stride(0),
        num_sequences,
        heads_at_once(num_kv_heads, max_tiles, num_multiprocessors(query.device)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        NUM_STAGES=NUM_STAGES,
        WINDOW=rules.window,
        SOFTCAP=rules.softcap,
        num_warps=4,
    )
