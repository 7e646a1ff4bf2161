"""Causal attention of a ragged batch over a paged KV cache; decode and prefill sequences mixed freely.

    paged_attention(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
                    max_query_len, max_seq_len, scale) -> output [T, Hq, D], contiguous
        query                    [T, Hq, D]         new tokens of all sequences, concatenated; D is contiguous
        key_cache, value_cache   [N, Hkv, BS, D]    equal strides (views of one pool); D is contiguous; Hq = G * Hkv
        block_tables             [S, B]     int32   block ids; only the first ceil(seq_len / BS) of a row are read
        query_start_loc          [S + 1]    int32   sequence s owns the query rows from entry s up to entry s + 1
        seq_lens                 [S]        int32   tokens of a sequence, the new ones (already stored) included
        max_query_len, max_seq_len          int     upper bounds known to the host: launching never waits for the device

The last query row of a sequence is at position seq_len - 1; a row sees the keys at its own position and before. A row
that sees no key (seq_len 0, the padding of a batch) gives 0; rows that no sequence owns are left undefined. Whatever
lies in unused slots, in block 0 or behind a table's used part, NaN included, has no effect. Softmax in float32;
products accumulate in float32, those of float32 are three tf32 products each (error about 1e-6). A sequence's result
does not depend on what else is in the batch: see `_launch_decode`.

Does not know layers, and does not write the cache (kv_cache_store.py does, before).
"""
# The operation has nine arguments; a structure would be a type that kernels and engine must share.
# ruff: noqa: PLR0913, PLR0917

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.paged_attention_kernels import decode_kernel, merge_splits_kernel, prefill_kernel


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if seq_len > 0 and rows.stop > rows.start:
            used_blocks = block_tables[sequence, : -(-seq_len // key_cache.shape[2])].long()
            keys, values = (_gather(cache, used_blocks, seq_len) for cache in (key_cache, value_cache))
            output[rows] = _attend_reference(query[rows], keys, values, scale)
    return output


def _gather(cache: Tensor, used_blocks: Tensor, seq_len: int) -> Tensor:
    """[seq_len, Hkv, D]: the sequence's keys or values in order, as a contiguous cache would hold them."""
    return cache[used_blocks].transpose(1, 2).flatten(0, 1)[:seq_len]


def _attend_reference(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_len, seq_len, group = query.shape[0], keys.shape[0], query.shape[1] // keys.shape[1]
    keys, values = (tensor.to(dtype).repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), keys) * scale
    row_positions = torch.arange(seq_len - query_len, seq_len, device=query.device)
    visible = torch.arange(seq_len, device=query.device) <= row_positions[:, None]
    # A row before position 0 sees nothing: its softmax is 0 / 0, its output 0.
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).masked_fill(~visible, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


@dataclass(frozen=True)
class TileConfig:
    """Rows (tokens x group) by keys of a tile, warps, and loads in flight; compiled for sm_90 in the tests."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_config(dtype: torch.dtype, decode: bool) -> TileConfig:
    if dtype == torch.float32:
        # For tests and debugging: 32 rows, or 64 keys, already spill at D 128 with the three products of tf32x3.
        return TileConfig(16, 32, 4, 2)
    return TileConfig(16, 64, 4, 3) if decode else TileConfig(128, 64, 8, 3)


# Keys a split: batch 1 at 1k tokens and 8 kv heads gets 32 programs, and partial results cost 3 % of the bytes read.
MIN_SPLIT_TOKENS = 256
# 64 splits x 8 kv heads fill an H200 (132 SMs, 3 programs each) from one sequence; the workspace stays 64 rows a head.
MAX_SPLITS = 64
LOG2_E = math.log2(math.e)


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    assert query.stride(2) == key_cache.stride(3) == 1 and query.shape[1] % key_cache.shape[1] == 0
    assert key_cache.stride() == value_cache.stride() and query.dtype == key_cache.dtype == value_cache.dtype
    assert block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
    assert query_start_loc.is_contiguous() and seq_lens.is_contiguous() and block_tables.stride(1) == 1
    output = query.new_empty(query.shape)
    batch = (query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, output)
    _launch_decode(*batch, max_seq_len, scale)
    if max_query_len > 1:
        _launch_prefill(*batch, scale)
    return output


def _launch_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    max_seq_len: int,
    scale: float,
) -> None:
    """Sequences with one new token, split over their keys. Which launch serves a sequence and how it is split depends
    on its own lengths alone, so that neighbours in the batch cannot change its result."""
    num_sequences, num_heads = seq_lens.shape[0], query.shape[1]
    constants = _constants(query, key_cache, decode=True)
    splits = {"MIN_SPLIT_TOKENS": MIN_SPLIT_TOKENS, "MAX_SPLITS": MAX_SPLITS}
    grid_splits = max(1, min(triton.cdiv(max_seq_len, MIN_SPLIT_TOKENS), MAX_SPLITS))
    split_logs = query.new_empty(num_sequences, num_heads, grid_splits, dtype=torch.float32)
    split_outputs = query.new_empty(*split_logs.shape, query.shape[2], dtype=torch.float32)
    decode_kernel[(key_cache.shape[1], grid_splits, num_sequences)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        output,
        split_outputs,
        split_logs,
        scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        **constants,
        **splits,
    )
    if grid_splits > 1:
        merge_splits_kernel[(num_heads, num_sequences)](
            split_outputs,
            split_logs,
            query_start_loc,
            seq_lens,
            output,
            grid_splits,
            HEAD_DIM=constants["HEAD_DIM"],
            BLOCK_DIM=constants["BLOCK_DIM"],
            BLOCK_SPLITS=16,
            num_warps=4,
            **splits,
        )


def _launch_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    scale: float,
) -> None:
    """Sequences with several new tokens, a program for each tile of them."""
    num_kv_heads, num_sequences = key_cache.shape[1], seq_lens.shape[0]
    constants = _constants(query, key_cache, decode=False)
    tile_tokens = constants["BLOCK_M"] // constants["GROUP"]
    max_tiles = query.shape[0] // tile_tokens + num_sequences
    prefill_kernel[(max_tiles * num_kv_heads,)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        output,
        scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        num_sequences,
        NUM_KV_HEADS=num_kv_heads,
        **constants,
    )


def _constants(query: Tensor, key_cache: Tensor, decode: bool) -> dict[str, int | str]:
    """The compile-time arguments that both kernels take, num_warps included."""
    config = tile_config(query.dtype, decode)
    group, head_dim = query.shape[1] // key_cache.shape[1], query.shape[2]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        # 64 at least: Triton 3.6 has sporadic illegal accesses on Hopper with tiles of 32 lanes and several dots.
        "BLOCK_DIM": max(64, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": key_cache.shape[2],
        "BLOCK_M": max(config.block_m, triton.next_power_of_2(group)),
        "BLOCK_N": config.block_n,
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
        "NUM_STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
) -> Tensor:
    attend = paged_attention_triton if query.is_cuda else paged_attention_reference
    return attend(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, max_query_len, max_seq_len, scale
    )
