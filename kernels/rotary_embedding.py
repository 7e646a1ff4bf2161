"""Rotary position embedding of queries and keys, half-split convention (element i is paired with i + D / 2).

    rotary_embedding(query, key, positions, cos_sin_table) -> (query, key), rotated copies
        query          [T, Hq, D]      heads and tokens may be strided, D is contiguous and even
        key            [T, Hkv, D]     likewise
        positions      [T]             int32 or int64, each in [0, max_len)
        cos_sin_table  [max_len, D]    float32, contiguous: D / 2 cosines, then D / 2 sines

Float32 inside, one rounding at the end, to the dtype of the input. Does not know how the table was made (base,
scaling).
"""
# Triton takes no structures: what a kernel needs are flat arguments.
# ruff: noqa: PLR0913, PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotary_embedding_reference(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_table: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    return _rotate_reference(query, cos, sin), _rotate_reference(key, cos, sin)


def _rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


@triton.jit
def _rotate_heads(
    source, target, token, token_stride, head_stride, cos, sin,
    NUM_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (heads < NUM_HEADS) & (lanes < HALF_DIM)
    read = source + token * token_stride + heads * head_stride + lanes
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + HALF_DIM, mask=inside, other=0.0).to(tl.float32)
    write = target + (token * NUM_HEADS + heads) * (2 * HALF_DIM) + lanes
    tl.store(write, (first * cos - second * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(write + HALF_DIM, (second * cos + first * sin).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_embedding_kernel(
    query, key, positions, cos_sin_table, rotated_query, rotated_key, query_token_stride, query_head_stride,
    key_token_stride, key_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_HALF)
    angles = cos_sin_table + tl.load(positions + token).to(tl.int64) * (2 * HALF_DIM) + lanes
    cos = tl.load(angles, mask=lanes < HALF_DIM, other=0.0)[None, :]
    sin = tl.load(angles + HALF_DIM, mask=lanes < HALF_DIM, other=0.0)[None, :]
    _rotate_heads(
        query, rotated_query, token, query_token_stride, query_head_stride, cos, sin,
        NUM_HEADS, BLOCK_HEADS, HALF_DIM, BLOCK_HALF,
    )  # fmt: skip
    _rotate_heads(
        key, rotated_key, token, key_token_stride, key_head_stride, cos, sin,
        NUM_KV_HEADS, BLOCK_KV_HEADS, HALF_DIM, BLOCK_HALF,
    )  # fmt: skip


def rotary_embedding_triton(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_table: Tensor
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert key.shape == (num_tokens, num_kv_heads, head_dim) and query.stride(2) == key.stride(2) == 1
    assert cos_sin_table.dtype == torch.float32 and cos_sin_table.is_contiguous() and positions.is_contiguous()
    rotated_query, rotated_key = query.new_empty(query.shape), key.new_empty(key.shape)
    _rotary_embedding_kernel[(num_tokens,)](
        query,
        key,
        positions,
        cos_sin_table,
        rotated_query,
        rotated_key,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HALF_DIM=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return rotated_query, rotated_key


def rotary_embedding(query: Tensor, key: Tensor, positions: Tensor, cos_sin_table: Tensor) -> tuple[Tensor, Tensor]:
    if query.is_cuda:
        return rotary_embedding_triton(query, key, positions, cos_sin_table)
    return rotary_embedding_reference(query, key, positions, cos_sin_table)
