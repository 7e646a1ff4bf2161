"""The Triton kernels of paged_attention.py, which holds their contract, reference and launch.

decode_kernel serves the sequences with one new token, split over their keys; merge_splits_kernel joins the splits;
prefill_kernel serves the others, tile by tile. A row of a tile is a (token, query head) pair of one kv head, so that
the GROUP query heads that share keys read them once. Does not know how grids and tiles are chosen.
"""
# Triton takes no structures: what a kernel needs are flat arguments.
# ruff: noqa: PLR0913, PLR0917

import triton
import triton.language as tl


@triton.jit
def _attend_keys(
    query_tile, accumulator, row_sum, row_max, key_head, value_head, block_table, first_key, end_key, row_positions,
    seq_len, scale_log2, cache_block_stride, cache_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [first_key, end_key) into the running softmax (accumulator, row_sum, row_max); row_max in log2 units."""
    tile = tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_DIM)
    # The block ids of a tile are loaded one iteration ahead. Loaded in their own iteration they would make the loads
    # of keys and values depend on a load, and the pipeliner then keeps one tile in flight instead of two (39 against
    # 73 KB).
    block_ids = tl.load(block_table + (first_key + tile) // BLOCK_SIZE, mask=first_key + tile < seq_len, other=0)
    for start in tl.range(first_key, end_key, BLOCK_N, num_stages=NUM_STAGES):
        keys = start + tile
        next_keys = keys + BLOCK_N
        next_block_ids = tl.load(block_table + next_keys // BLOCK_SIZE, mask=next_keys < seq_len, other=0)
        # int64: with a block stride of 1 Mi elements (an 8B model) block 2048 is beyond int32.
        offsets = block_ids.to(tl.int64) * cache_block_stride + keys % BLOCK_SIZE * cache_slot_stride
        key_pointers = key_head + offsets[None, :] + lanes[:, None]
        value_pointers = value_head + offsets[:, None] + lanes[None, :]
        if HEAD_DIM == BLOCK_DIM:
            key_tile = tl.load(key_pointers)
        else:
            key_tile = tl.load(key_pointers, mask=lanes[:, None] < HEAD_DIM, other=0.0)
        scores = tl.dot(query_tile, key_tile, input_precision=PRECISION)
        if MASKED:
            # This also wipes the scores of unused slots, so that keys need no mask of their own.
            scores = tl.where(keys[None, :] <= row_positions[:, None], scores, float("-inf"))
        # The scale sits inside the exponent, one FMA: scaling a bf16 query beforehand would round it.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        row_max = new_max
        if MASKED:
            # A weight of 0 does not silence NaN: unused slots must not be loaded at all.
            used = (keys < seq_len)[:, None] & (lanes < HEAD_DIM)[None, :]
            value_tile = tl.load(value_pointers, mask=used, other=0.0)
        elif HEAD_DIM == BLOCK_DIM:
            value_tile = tl.load(value_pointers)
        else:
            value_tile = tl.load(value_pointers, mask=lanes[None, :] < HEAD_DIM, other=0.0)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=PRECISION)
        block_ids = next_block_ids
    return accumulator, row_sum, row_max


@triton.jit
def _attend_rows(
    query, key_cache, value_cache, block_table, first_row, first_token, query_len, seq_len, first_key, end_key,
    kv_head, scale_log2, query_token_stride, query_head_stride, cache_block_stride, cache_head_stride,
    cache_slot_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M // GROUP tokens, GROUP query heads each, against keys [first_key, end_key): the normalised
    output [BLOCK_M, BLOCK_DIM] and the log2 of each row's sum of exponentials."""
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_DIM)
    tokens = first_token + rows // GROUP
    read = (first_row + tokens)[:, None].to(tl.int64) * query_token_stride + lanes[None, :]
    read += (kv_head * GROUP + rows % GROUP)[:, None] * query_head_stride
    owned = (tokens < query_len)[:, None] & (lanes < HEAD_DIM)[None, :]
    query_tile = tl.load(query + read, mask=owned, other=0.0)

    first_position = seq_len - query_len + first_token
    row_positions = tl.minimum(first_position + rows // GROUP, seq_len - 1)
    end_key = tl.minimum(end_key, tl.minimum(first_position + BLOCK_M // GROUP, seq_len))
    # Whole tiles that every row sees need no mask; tiles lie at absolute multiples of BLOCK_N, so that the order of a
    # row's additions does not depend on how its prompt was chunked.
    seen_by_all = tl.maximum(tl.minimum(first_position + 1, end_key) - first_key, 0)
    first_masked_key = first_key + seen_by_all // BLOCK_N * BLOCK_N

    key_head = key_cache + kv_head.to(tl.int64) * cache_head_stride
    value_head = value_cache + kv_head.to(tl.int64) * cache_head_stride
    accumulator = tl.zeros([BLOCK_M, BLOCK_DIM], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    accumulator, row_sum, row_max = _attend_keys(
        query_tile, accumulator, row_sum, row_max, key_head, value_head, block_table, first_key, first_masked_key,
        row_positions, seq_len, scale_log2, cache_block_stride, cache_slot_stride,
        HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_N, False, PRECISION, NUM_STAGES,
    )  # fmt: skip
    accumulator, row_sum, row_max = _attend_keys(
        query_tile, accumulator, row_sum, row_max, key_head, value_head, block_table, first_masked_key, end_key,
        row_positions, seq_len, scale_log2, cache_block_stride, cache_slot_stride,
        HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_N, True, PRECISION, 1,
    )  # fmt: skip
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    return accumulator / divisor[:, None], row_max + tl.log2(divisor)


@triton.jit
def _split_tokens(seq_len, MIN_SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys a split of this sequence has; a function of its own length alone."""
    return tl.maximum(MIN_SPLIT_TOKENS, tl.cdiv(tl.cdiv(seq_len, MAX_SPLITS), MIN_SPLIT_TOKENS) * MIN_SPLIT_TOKENS)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, output, split_outputs, split_logs,
    scale_log2, query_token_stride, query_head_stride, cache_block_stride, cache_head_stride, cache_slot_stride,
    table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (kv head, split, sequence); heads run fastest because they share a block."""
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_row
    seq_len = tl.load(seq_lens + sequence)
    split_tokens = _split_tokens(seq_len, MIN_SPLIT_TOKENS, MAX_SPLITS)
    first_key = split * split_tokens
    if (query_len != 1) | ((split > 0) & (first_key >= seq_len)):
        return
    block_table = block_tables + sequence.to(tl.int64) * table_stride
    attended, log_sum = _attend_rows(
        query, key_cache, value_cache, block_table, first_row, 0, query_len, seq_len, first_key,
        first_key + split_tokens,
        kv_head, scale_log2, query_token_stride, query_head_stride, cache_block_stride, cache_head_stride,
        cache_slot_stride, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION, NUM_STAGES,
    )  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + rows
    num_heads = tl.num_programs(0) * GROUP
    owned = (rows < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    if seq_len <= split_tokens:
        write = (first_row.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + lanes[None, :]
        tl.store(output + write, attended.to(output.dtype.element_ty), mask=owned)
    else:
        part = (sequence.to(tl.int64) * num_heads + heads) * tl.num_programs(1) + split
        tl.store(split_outputs + part[:, None] * HEAD_DIM + lanes[None, :], attended, mask=owned)
        tl.store(split_logs + part, log_sum, mask=rows < GROUP)


@triton.jit(do_not_specialize=["grid_splits"])
def merge_splits_kernel(
    split_outputs, split_logs, query_start_loc, seq_lens, output, grid_splits,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence): the splits of one decode row, weighted by their sums, in ascending order."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    row = tl.load(query_start_loc + sequence)
    seq_len = tl.load(seq_lens + sequence)
    split_tokens = _split_tokens(seq_len, MIN_SPLIT_TOKENS, MAX_SPLITS)
    if (tl.load(query_start_loc + sequence + 1) - row != 1) | (seq_len <= split_tokens):
        return
    num_splits = tl.cdiv(seq_len, split_tokens)
    lanes = tl.arange(0, BLOCK_DIM)
    first_part = (sequence.to(tl.int64) * num_heads + head) * grid_splits
    accumulator = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    total = 0.0
    maximum = float("-inf")
    for first_split in range(0, num_splits, BLOCK_SPLITS):
        splits = first_split + tl.arange(0, BLOCK_SPLITS)
        logs = tl.load(split_logs + first_part + splits, mask=splits < num_splits, other=float("-inf"))
        read = (first_part + splits)[:, None] * HEAD_DIM + lanes[None, :]
        inside = (splits < num_splits)[:, None] & (lanes < HEAD_DIM)[None, :]
        parts = tl.load(split_outputs + read, mask=inside, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(logs, axis=0))
        weights = tl.exp2(logs - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        accumulator = accumulator * decay + tl.sum(parts * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        maximum = new_maximum
    write = (row.to(tl.int64) * num_heads + head) * HEAD_DIM + lanes
    tl.store(output + write, (accumulator / total).to(output.dtype.element_ty), mask=lanes < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def prefill_kernel(
    query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, output, scale_log2, query_token_stride,
    query_head_stride, cache_block_stride, cache_head_stride, cache_slot_stride, table_stride, num_sequences,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program = kv head of a tile of tokens. Sequence s has the tiles from start // TILE_TOKENS + s on: an upper
    bound of what it needs, known without a plan made by the host."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Last tiles first: they see the most keys, and a long program that starts last would run alone.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, tile = program % NUM_KV_HEADS, program // NUM_KV_HEADS
    sequence, beyond = 0, num_sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(query_start_loc + middle) // TILE_TOKENS + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    first_row = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - first_row
    first_token = (tile - first_row // TILE_TOKENS - sequence) * TILE_TOKENS
    # A sequence with one new token belongs to the decode kernel, whatever else is in the batch.
    if (query_len <= 1) | (first_token >= query_len):
        return
    seq_len = tl.load(seq_lens + sequence)
    block_table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    attended, _ = _attend_rows(
        query, key_cache, value_cache, block_table, first_row, first_token, query_len, seq_len, 0, seq_len,
        kv_head, scale_log2, query_token_stride, query_head_stride, cache_block_stride, cache_head_stride,
        cache_slot_stride, GROUP, HEAD_DIM, BLOCK_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, PRECISION, NUM_STAGES,
    )  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_DIM)
    tokens = first_token + rows // GROUP
    owned = ((rows < TILE_TOKENS * GROUP) & (tokens < query_len))[:, None] & (lanes < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    write = ((first_row + tokens).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(output + write, attended.to(output.dtype.element_ty), mask=owned)
