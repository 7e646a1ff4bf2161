"""Scatter the keys and values of new tokens into their slots of the paged KV cache.

    store_kv(key, value, key_cache, value_cache, slot_mapping) -> None, writes into the caches
        key, value               [T, Hkv, D]        strides may differ; D is contiguous
        key_cache, value_cache   [N, Hkv, BS, D]    equal strides (views of one pool); D is contiguous
        slot_mapping             [T]                int32 or int64: block * BS + offset; -1 = padding, ignored

Slots are distinct. Nothing but the named slots changes. Does not know which sequence a token belongs to.
"""
# Triton takes no structures: what a kernel needs are flat arguments.
# ruff: noqa: PLR0913, PLR0917

import triton
import triton.language as tl
from torch import Tensor


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[kept]
    value_cache[blocks, :, offsets] = value[kept]


@triton.jit
def _store_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, key_token_stride, key_head_stride, value_token_stride,
    value_head_stride, cache_block_stride, cache_head_stride, cache_slot_stride,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # int64: a block's stride is L * 2 * Hkv * BS * D elements (1 Mi for an 8B model), so 2048 blocks overflow int32.
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    lanes = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (heads < NUM_KV_HEADS) & (lanes < HEAD_DIM)
    target = slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
    write = target + heads * cache_head_stride + lanes
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + lanes, mask=inside)
    values = tl.load(value + token * value_token_stride + heads * value_head_stride + lanes, mask=inside)
    tl.store(key_cache + write, keys, mask=inside)
    tl.store(value_cache + write, values, mask=inside)


def store_kv_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.shape == value.shape and key_cache.shape[1::2] == (num_kv_heads, head_dim)
    assert key.stride(2) == value.stride(2) == key_cache.stride(3) == 1 and slot_mapping.is_contiguous()
    assert key_cache.stride() == value_cache.stride() and key.dtype == key_cache.dtype == value_cache.dtype
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        BLOCK_SIZE=key_cache.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    if key.is_cuda:
        store_kv_triton(key, value, key_cache, value_cache, slot_mapping)
    else:
        store_kv_reference(key, value, key_cache, value_cache, slot_mapping)
