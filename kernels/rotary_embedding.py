"""Rotary embedding of new queries and keys, and the store of keys and values in the paged KV cache, in one pass.

Rotation is half-split (element i is paired with i + D / 2), in float32 with one rounding at the end. Slots are distinct
and nothing else in the cache changes. Numbers for an e4m3 cache are divided by their scales, rounded once more, and
clamped to +-448 (fp8_kv.py). Source: RoFormer, https://arxiv.org/abs/2104.09864.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales, to_e4m3
from kernels.rms_norm import rms_norm_reference

# 8 heads of 128 for 4 warps: 8 elements per thread. A token of an 8B model is 6 programs instead of one long one.
_HEADS_PER_PROGRAM = 8


@dataclass(frozen=True, slots=True)
class QkNorms:
    """Weights of the norms applied to each query and key head before the rotation."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


@dataclass(frozen=True, slots=True)
class RotaryInput:
    """Queries and keys to rotate, and the cache slots of keys and values."""

    qkv: Tensor  # [T, Hq + 2 * Hkv, D]: queries, keys, values per token; contiguous, D even
    positions: Tensor  # [T] int32 or int64, each in [0, max_len)
    cos_sin_table: Tensor  # [max_len, D] float32, contiguous: D / 2 cosines, then D / 2 sines
    key_cache: Tensor  # [N, Hkv, BS, D] with the strides of value_cache (views of one pool); D contiguous
    value_cache: Tensor
    slot_mapping: Tensor  # [T] int32 or int64: block * BS + offset; -1: padding, not stored
    norms: QkNorms | None = None  # per query head and key head, before the rotation
    kv_scales: KVScales = UNIT_SCALES  # for an e4m3 cache
    query_scales: Tensor | None = None  # [max_len] float32: factors of rotated queries by position


def rotate_reference(heads: Tensor, positions: Tensor, cos_sin_table: Tensor) -> Tensor:
    """Return a rotated copy of heads [T, H, D]."""
    cos, sin = cos_sin_table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def rotate_and_store_reference(inputs: RotaryInput) -> None:
    num_kv_heads, norms = inputs.key_cache.shape[1], inputs.norms
    rotated, value = inputs.qkv[:, :-num_kv_heads], inputs.qkv[:, -num_kv_heads:]
    exact = rotated.to(torch.promote_types(rotated.dtype, torch.float32))
    if norms is not None:
        query, key = exact[:, :-num_kv_heads], exact[:, -num_kv_heads:]
        normed = (rms_norm_reference(query, norms.query, norms.eps), rms_norm_reference(key, norms.key, norms.eps))
        exact = torch.cat(normed, dim=1)
    exact = rotate_reference(exact, inputs.positions, inputs.cos_sin_table)
    if inputs.query_scales is not None:
        exact[:, :-num_kv_heads] *= inputs.query_scales[inputs.positions.long(), None, None]
    rotated.copy_(exact)
    key = rotated[:, -num_kv_heads:]
    if inputs.key_cache.dtype == E4M3:
        key, value = to_e4m3(key, inputs.kv_scales.key), to_e4m3(value, inputs.kv_scales.value)
    store_kv_reference(key, value, inputs.key_cache, inputs.value_cache, inputs.slot_mapping)


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store key and value [T, Hkv, D] in their slots."""
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[kept]
    value_cache[blocks, :, offsets] = value[kept]


@triton.jit
def _norm_weights(query_norm, key_norm, is_query, lanes, OFFSET: tl.constexpr, HALF_DIM: tl.constexpr):
    """Return float32 weights [heads, lanes] of queries or keys; those of values are unused."""
    of_queries = tl.load(query_norm + OFFSET + lanes, mask=lanes < HALF_DIM, other=0.0).to(tl.float32)
    of_keys = tl.load(key_norm + OFFSET + lanes, mask=lanes < HALF_DIM, other=0.0).to(tl.float32)
    return tl.where(is_query, of_queries[None, :], of_keys[None, :])


@triton.jit
def _to_e4m3(x, factor):
    """Scale, clamp to +-448 and convert; NaN stays NaN."""
    exact = x.to(tl.float32) * factor
    exact = tl.where(exact > 448.0, 448.0, exact)
    return tl.where(exact < -448.0, -448.0, exact).to(tl.float8e4nv)


@triton.jit
def _rotate_and_store_kernel(
    qkv, positions, cos_sin_table, key_cache, value_cache, slot_mapping, query_norm, key_norm, eps, key_factor,
    value_factor, query_scales,
    cache_block_stride, cache_head_stride, cache_slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_NORMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token).to(tl.int64)
    angles = cos_sin_table + position * (2 * HALF_DIM) + lanes
    cos = tl.load(angles, mask=lanes < HALF_DIM, other=0.0)[None, :]
    sin = tl.load(angles + HALF_DIM, mask=lanes < HALF_DIM, other=0.0)[None, :]
    # int64: a block's stride is L * 2 * Hkv * BS * D elements (1 Mi for an 8B model), so int32 overflows at 2048
    # blocks.
    slot = tl.load(slot_mapping + token).to(tl.int64)

    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (lanes < HALF_DIM)[None, :]
    read = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads) * (2 * HALF_DIM) + lanes[None, :]
    first, second = tl.load(read, mask=inside, other=0.0), tl.load(read + HALF_DIM, mask=inside, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS
    if HAS_NORMS:
        is_query = heads < NUM_HEADS
        inverse_rms = 1.0 / tl.sqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF_DIM) + eps)
        x *= inverse_rms[:, None] * _norm_weights(query_norm, key_norm, is_query, lanes, 0, HALF_DIM)
        y *= inverse_rms[:, None] * _norm_weights(query_norm, key_norm, is_query, lanes, HALF_DIM, HALF_DIM)
    rotated_first, rotated_second = x * cos - y * sin, y * cos + x * sin
    if query_scales is not None:
        scale = tl.where(heads < NUM_HEADS, tl.load(query_scales + position), 1.0)
        rotated_first, rotated_second = rotated_first * scale, rotated_second * scale
    first = tl.where(is_rotated, rotated_first.to(first.dtype), first)
    second = tl.where(is_rotated, rotated_second.to(second.dtype), second)
    tl.store(read, first, mask=inside & is_rotated)
    tl.store(read + HALF_DIM, second, mask=inside & is_rotated)

    kv_head = (heads - NUM_HEADS) % NUM_KV_HEADS
    target = slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
    target += kv_head * cache_head_stride + lanes[None, :]
    if key_factor is not None:
        factor = tl.where(is_rotated, key_factor, value_factor)
        first, second = _to_e4m3(first, factor), _to_e4m3(second, factor)
    is_key = inside & is_rotated & (heads >= NUM_HEADS) & (slot >= 0)
    is_value = inside & (heads >= NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    tl.store(key_cache + target, first, mask=is_key)
    tl.store(key_cache + target + HALF_DIM, second, mask=is_key)
    tl.store(value_cache + target, first, mask=is_value)
    tl.store(value_cache + target + HALF_DIM, second, mask=is_value)


def rotate_and_store_triton(inputs: RotaryInput) -> None:
    qkv, positions, cos_sin_table, norms = inputs.qkv, inputs.positions, inputs.cos_sin_table, inputs.norms
    key_cache, value_cache, slot_mapping = inputs.key_cache, inputs.value_cache, inputs.slot_mapping
    num_tokens, num_qkv_heads, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[1]
    assert qkv.is_contiguous() and positions.is_contiguous() and slot_mapping.is_contiguous()
    assert cos_sin_table.dtype == torch.float32 and cos_sin_table.is_contiguous()
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1 and key_cache.shape[3] == head_dim
    is_fp8, scales = key_cache.dtype == E4M3, inputs.kv_scales
    assert key_cache.dtype == value_cache.dtype and (is_fp8 or qkv.dtype == key_cache.dtype)
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_qkv_heads, _HEADS_PER_PROGRAM))](
        qkv,
        positions,
        cos_sin_table,
        key_cache,
        value_cache,
        slot_mapping,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        1.0 / scales.key if is_fp8 else None,
        1.0 / scales.value if is_fp8 else None,
        inputs.query_scales,
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        NUM_HEADS=num_qkv_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        HALF_DIM=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=key_cache.shape[2],
        HAS_NORMS=norms is not None,
        num_warps=4,
        **dependent_launch(qkv),
    )


def rotate_and_store(inputs: RotaryInput) -> None:
    """Rotate queries and keys in place, then store keys and values in their slots."""
    operation = rotate_and_store_triton if inputs.qkv.is_cuda else rotate_and_store_reference
    operation(inputs)
