"""Triton kernels of the recurrent layers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.recurrent.batch import PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.chunks import CHUNK, has_chunks, run_in_chunks
from kernels.recurrent.output_gates import gated_rms_norm, multiply_sigmoid, rms_norm_of_gated
from kernels.recurrent.recurrence import Recurrence, has_decode_tiles, run_decode, run_token_by_token

_CONV_TOKENS, _CONV_CHANNELS = 16, 256


@triton.jit
def _input_at(x, x_stride, history, at, channel, inside, channels, WIDTH: tl.constexpr):
    """Return the input at index `at` of the step's tokens of a sequence; before them, that of its history."""
    new = tl.load(x + at.to(tl.int64) * x_stride + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    old = tl.load(history + (at + WIDTH - 1) * channels + channel, mask=inside & (at < 0), other=0.0)
    return new + old


@triton.jit
def _before(history, pending, kept, sequence, num_tokens, channels):
    """Return the inputs before the step, and how many tokens of the step the state is kept after."""
    before, num_kept = history, num_tokens
    if pending is not None:
        num_pending = tl.load(pending + sequence)
        before, num_kept = history + num_pending * channels, tl.load(kept + sequence) - num_pending
    return before, num_kept


@triton.jit
def _keep_inputs(x, x_stride, before, history, num_tokens, channel, inside, channels, WIDTH: tl.constexpr):
    for index in tl.static_range(WIDTH - 1):
        at = num_tokens - (WIDTH - 1) + index + tl.zeros_like(channel)
        kept = _input_at(x, x_stride, before, at, channel, inside, channels, WIDTH)
        tl.store(history + index * channels + channel, kept, mask=inside)


@triton.jit(do_not_specialize=["x_stride"])
def _causal_conv_kernel(
    x, weight, bias, out, states, state_blocks, starts, pending, kept, x_stride, state_stride, channels,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, KEEPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - start
    first = tl.program_id(1) * TOKENS
    if first < num_tokens:
        block = tl.load(state_blocks + sequence)
        history = states + block.to(tl.int64) * state_stride
        before, num_kept = _before(history, pending, kept, sequence, num_tokens, channels)
        own = x + start.to(tl.int64) * x_stride
        token = first + tl.arange(0, TOKENS)[:, None]
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for tap in tl.static_range(WIDTH):
            at = token - (WIDTH - 1) + tap + tl.zeros((TOKENS, CHANNELS), tl.int32)
            used = inside[None, :] & (token < num_tokens)
            factor = tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
            total += _input_at(own, x_stride, before, at, channel[None, :], used, channels, WIDTH) * factor[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
        total = total * tl.sigmoid(total)
        target = out + (start + token).to(tl.int64) * channels + channel[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=inside[None, :] & (token < num_tokens))
        if KEEPS and block != 0:
            tl.debug_barrier()  # other threads have read the history
            _keep_inputs(own, x_stride, before, history, num_kept, channel, inside, channels, WIDTH)


@triton.jit(do_not_specialize=["x_stride"])
def _keep_inputs_kernel(
    x, states, state_blocks, starts, pending, kept, x_stride, state_stride, channels,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - start
    block = tl.load(state_blocks + sequence)
    if (block != 0) & (num_tokens > 0):
        history = states + block.to(tl.int64) * state_stride
        before, num_kept = _before(history, pending, kept, sequence, num_tokens, channels)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        own = x + start.to(tl.int64) * x_stride
        _keep_inputs(own, x_stride, before, history, num_kept, channel, channel < channels, channels, WIDTH)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: RecurrentBatch) -> Tensor:
    num_sequences, (width, channels) = len(batch.state_blocks), weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and states.stride()[1:] == (channels, 1)
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    tokens = min(_CONV_TOKENS, triton.next_power_of_2(batch.max_query_len))
    parts, num_chunks = triton.cdiv(channels, _CONV_CHANNELS), triton.cdiv(batch.max_query_len, tokens)
    drafts = (batch.drafts.pending, batch.drafts.kept) if batch.drafts is not None else (None, None)
    sequences = (states, batch.state_blocks, batch.query_start_loc, *drafts, x.stride(0), states.stride(0), channels)
    _causal_conv_kernel[num_sequences, num_chunks, parts](
        x, weight, bias, out, *sequences, WIDTH=width, TOKENS=tokens, CHANNELS=_CONV_CHANNELS, KEEPS=num_chunks == 1,
        **dependent_launch(x),
    )  # fmt: skip
    if num_chunks > 1:  # another program may not have read the history yet
        _keep_inputs_kernel[num_sequences, parts](
            x, *sequences, WIDTH=width, CHANNELS=_CONV_CHANNELS, **dependent_launch(x)
        )
    return out


@triton.jit(do_not_specialize=["row_stride"])
def _keep_rows_kernel(
    rows, target, state_blocks, starts, pending, kept, row_stride, state_stride, size,
    CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - start
    block = tl.load(state_blocks + sequence)
    has_drafts = tl.load(kept + sequence) < tl.load(pending + sequence) + num_tokens
    if has_drafts & (block != 0):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        for token in range(num_tokens):
            row = tl.load(rows + (start + token).to(tl.int64) * row_stride + channel, mask=channel < size, other=0.0)
            place = target + block.to(tl.int64) * state_stride + token * size + channel
            tl.store(place, row.to(tl.float32), mask=channel < size)


def keep_inputs(rows: Tensor, kept: Tensor, batch: RecurrentBatch) -> None:
    size, drafts = rows.shape[1], batch.drafts
    assert drafts is not None and rows.stride(1) == 1 and kept.stride()[1:] == (size, 1)
    _keep_rows_kernel[len(batch.state_blocks), triton.cdiv(size, _CONV_CHANNELS)](
        rows, kept, batch.state_blocks, batch.query_start_loc, drafts.pending, drafts.kept, rows.stride(0),
        kept.stride(0), size, CHANNELS=_CONV_CHANNELS, **dependent_launch(rows),
    )  # fmt: skip


class TritonRecurrent:
    """RecurrentOperators on CUDA."""

    causal_conv = staticmethod(causal_conv)
    keep_inputs = staticmethod(keep_inputs)
    gated_rms_norm = staticmethod(gated_rms_norm)
    rms_norm_of_gated = staticmethod(rms_norm_of_gated)
    multiply_sigmoid = staticmethod(multiply_sigmoid)

    def __init__(self, is_deterministic: bool = False) -> None:
        """Compute prompts in chunks, or, if `is_deterministic`, with the same bits however they are cut."""
        self._is_deterministic = is_deterministic

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: StateRates,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        return self._run(Recurrence(qkv, gates, rates, None, states, heads, batch, pending))

    def state_space(
        self,
        qkv: Tensor,
        step: Tensor,
        rates: StateRates,
        skip: Tensor,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
        pending: PendingInputs | None = None,
    ) -> Tensor:
        return self._run(Recurrence(qkv, step, rates, skip, states, heads, batch, pending))

    def _run(self, work: Recurrence) -> Tensor:
        out = work.new_output()
        if not self._is_deterministic and has_decode_tiles(work):
            run_decode(work, out)
        elif self._is_deterministic or work.batch.max_query_len < CHUNK or not has_chunks(work):
            run_token_by_token(work, out)
        else:
            run_in_chunks(work, out)
            run_token_by_token(work, out, longest=CHUNK - 1)
        return out
