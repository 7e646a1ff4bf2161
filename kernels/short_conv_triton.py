"""A causal depthwise convolution over inputs in a paged cache, in Triton; short_conv.py has it in torch.

Inputs of the step are read from the step, earlier ones from the cache. The cache has the dtype of the inputs, so an
output has the same bits whatever the step's chunks are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

_CHANNELS = 256


@dataclass(frozen=True, slots=True)
class ConvolvedTokens:
    """The tokens of a step.

    Attributes:
        sequences: [T] int32, the sequence of each token.
        query_start_loc: [S + 1] int32, first token of each sequence.
        positions: [T] int64, position of each token in its sequence.
        slots: [T] int64, slot of each token in the cache: block * BS + offset.
        block_tables: [S, B] int32, block ids.
    """

    sequences: Tensor
    query_start_loc: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor


@triton.jit
def _place(slot, channel, block_stride, kv_stride, head_stride, slot_stride, HEADS, HEAD_DIM, BLOCK_SIZE):
    """Return where channels of the token in a slot are in the cache [num_blocks, 2, Hkv, BS, D]."""
    head = channel // HEAD_DIM
    at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    return at + head // HEADS * kv_stride + head % HEADS * head_stride + channel % HEAD_DIM


@triton.jit(do_not_specialize=["x_stride", "table_stride"])
def _short_conv_kernel(
    x, weight, bias, out, cache, sequences, starts, positions, slots, tables, channels, x_stride, out_stride,
    table_stride, block_stride, kv_stride, head_stride, slot_stride,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    STORES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    if STORES:
        place = _place(
            tl.load(slots + token), channel, block_stride, kv_stride, head_stride, slot_stride,
            HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        own = tl.load(x + token * x_stride + channel, mask=inside, other=0.0)
        tl.store(cache + place, own.to(cache.dtype.element_ty), mask=inside)
        return
    sequence = tl.load(sequences + token)
    start, position = tl.load(starts + sequence), tl.load(positions + token)
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(WIDTH):
        before = WIDTH - 1 - tap
        is_new = token - before >= start
        is_old = (token - before < start) & (position >= before)
        new = tl.load(x + (token - before) * x_stride + channel, mask=inside & is_new, other=0.0)
        at = tl.maximum(position - before, 0)
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + at // BLOCK_SIZE).to(tl.int64)
        place = _place(
            block * BLOCK_SIZE + at % BLOCK_SIZE, channel, block_stride, kv_stride, head_stride, slot_stride,
            HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        old = tl.load(cache + place, mask=inside & is_old, other=0.0)
        factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + old.to(tl.float32)) * factor
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + channel, total.to(out.dtype.element_ty), mask=inside)


def short_conv_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, cache: Tensor, tokens: ConvolvedTokens, out: Tensor
) -> None:
    """Store the inputs x [T, C] in the cache and write their convolution to out [T, C].

    Args:
        x: May be strided by rows, as `out`.
        weight: [C, width].
        bias: [C], or None.
        cache: [num_blocks, 2, Hkv, BS, D]; C is at most 2 * Hkv * D.
        tokens: The tokens of the step.
        out: The outputs, of x's dtype.
    """
    _, _, num_heads, block_size, head_dim = cache.shape
    assert x.stride(1) == out.stride(1) == cache.stride(4) == 1 and weight.is_contiguous()
    for stores in (True, False):  # a token may read what another sequence of the step stores in a shared block
        _short_conv_kernel[len(x), triton.cdiv(x.shape[1], _CHANNELS)](
            x, weight, bias, out, cache, tokens.sequences, tokens.query_start_loc, tokens.positions, tokens.slots,
            tokens.block_tables, x.shape[1], x.stride(0), out.stride(0), tokens.block_tables.stride(0),
            *cache.stride()[:4], WIDTH=weight.shape[1], HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
            CHANNELS=_CHANNELS, STORES=stores, **dependent_launch(x),
        )  # fmt: skip


def sequences_of(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Return the sequence [T] int32 of each token, without a wait for the device; the last one for tokens after it."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    found = torch.searchsorted(query_start_loc[1:], tokens, right=True, out_int32=True)
    return found.clamp_(max=len(query_start_loc) - 2)
