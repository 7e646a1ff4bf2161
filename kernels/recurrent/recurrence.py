"""The gated delta rule and Mamba-2 token by token: each state follows from the previous one, as in decoding.

So an output has the same bits whatever the step's chunks and its other sequences are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.recurrent.batch import PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.recurrent.reference import L2_EPS

_COLUMNS, _WARPS = 16, 1  # of a state that a program updates
# In decode steps of many sequences, columns of 256 bytes are read and written faster: 3.9 against 3.3 TB/s on an H200.
# Their sums go over several warps, which makes the chain of a prompt's tokens slower. Few programs do not fill a GPU.
_DECODE_COLUMNS, _DECODE_WARPS, _DECODE_PROGRAMS = 64, 4, 256
_MAX_REGISTERS = 168  # with other limits up to 192, ptxas spills some in one of the two rules
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One layer's recurrence over the tokens of a step, as RecurrentOperators has its arguments.

    Attributes:
        qkv: [T, 2 * key_size + value_size].
        gates: [T, 2 * num_heads], beta and the step of the gated delta rule; of Mamba-2, the step [T, num_heads].
        rates: Of the decay.
        skip: [num_heads] float32 of Mamba-2; None: the gated delta rule.
        states: [N, num_heads, key_dim, value_dim] float32; updated.
        heads: The heads.
        batch: The sequences.
        pending: What the last step kept, if it had drafts; None: states know no drafts.
    """

    qkv: Tensor
    gates: Tensor
    rates: StateRates
    skip: Tensor | None
    states: Tensor
    heads: StateHeads
    batch: RecurrentBatch
    pending: PendingInputs | None = None

    def __post_init__(self) -> None:
        heads = self.heads
        assert self.qkv.stride(1) == self.gates.stride(1) == 1
        assert self.states.stride()[1:] == (heads.key_dim * heads.value_dim, heads.value_dim, 1)
        assert (self.pending is None) == (self.batch.drafts is None)

    def new_output(self) -> Tensor:
        return torch.empty((len(self.qkv), self.heads.value_size), dtype=self.qkv.dtype, device=self.qkv.device)

    def columns(self, most: int) -> int:
        """Return the columns of a state that one program updates: a power of two that divides them, at most `most`."""
        return min(self.heads.value_dim & -self.heads.value_dim, most)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _token_of(row, gate, keys, values, KEY_SIZE: tl.constexpr, STEP_AT: tl.constexpr):
    """Return query, key, value, the first gate and the step of a token, in float32."""
    return (
        tl.load(row + keys).to(tl.float32),
        tl.load(row + KEY_SIZE + keys).to(tl.float32),
        tl.load(row + values).to(tl.float32),
        tl.load(gate).to(tl.float32),
        tl.load(gate + STEP_AT).to(tl.float32),
    )


@triton.jit
def _advanced(
    state, query, key, value, beta, step, rate, bias, IS_DELTA: tl.constexpr, KEY_DIM: tl.constexpr, EPS: tl.constexpr
):
    """Return the state after a token, and the token's normed query."""
    if IS_DELTA:
        query = _unit(query, EPS) * (KEY_DIM**-0.5)
        key = _unit(key, EPS)
    share = softplus(step + bias)
    state *= tl.exp(rate * share)
    if IS_DELTA:
        known = tl.sum(state * key[:, None], 0)
        written = (value - known) * tl.sigmoid(beta)
    else:
        written = value * share
    state += key[:, None] * written[None, :]
    return state, query


@triton.jit
def _store_mixed(target, state, query, value, skip, head):
    """Store a token's output, a mix of the rows of the state after it."""
    mixed = tl.sum(state * query[:, None], 0)
    if skip is not None:
        mixed += value * tl.load(skip + head)
    tl.store(target, mixed.to(target.dtype.element_ty))


@triton.jit(do_not_specialize=["qkv_stride"])
def _recurrence_kernel(
    qkv, gates, decay, step_bias, skip, out, states, state_blocks, starts, pending, kept, pending_qkv, pending_gates,
    qkv_stride, state_stride,
    GATE_STRIDE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, LONGEST: tl.constexpr, EPS: tl.constexpr, IS_DECODE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run Mamba-2 with `skip`, the gated delta rule without it; then gates are beta, then the step."""
    STEP_AT: tl.constexpr = NUM_HEADS if skip is None else 0
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    if (start < end) & (end - start <= LONGEST):
        block = tl.load(state_blocks + sequence)
        rows = tl.arange(0, KEY_DIM)
        columns = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        place = states + block.to(tl.int64) * state_stride + head * (KEY_DIM * VALUE_DIM)
        place += rows[:, None] * VALUE_DIM + columns[None, :]
        state = tl.load(place)
        rate, bias = tl.load(decay + head), tl.load(step_bias + head)
        keys = head // (NUM_HEADS // NUM_KEY_HEADS) * KEY_DIM + rows
        values = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
        is_kept = True
        if pending is not None:
            CHANNELS: tl.constexpr = 2 * NUM_KEY_HEADS * KEY_DIM + NUM_HEADS * VALUE_DIM
            GATES: tl.constexpr = NUM_HEADS + STEP_AT
            old_row = pending_qkv + block.to(tl.int64) * state_stride
            old_gate = pending_gates + block.to(tl.int64) * state_stride + head
            num_pending = tl.load(pending + sequence)
            for index in range(num_pending):
                query, key, value, beta, step = _token_of(
                    old_row + index * CHANNELS, old_gate + index * GATES, keys, values, NUM_KEY_HEADS * KEY_DIM, STEP_AT
                )
                state, _ = _advanced(state, query, key, value, beta, step, rate, bias, skip is None, KEY_DIM, EPS)
            is_kept = tl.load(kept + sequence) > num_pending
            if (is_kept == 0) & (block != 0):
                tl.store(place, state)
        gate = gates + head
        row = start.to(tl.int64)
        query, key, value, beta, step = _token_of(
            qkv + row * qkv_stride, gate + row * GATE_STRIDE, keys, values, NUM_KEY_HEADS * KEY_DIM, STEP_AT
        )
        target = out + row * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + columns
        if IS_DECODE:  # no next token takes registers
            state, query = _advanced(state, query, key, value, beta, step, rate, bias, skip is None, KEY_DIM, EPS)
            _store_mixed(target, state, query, value, skip, head)
        else:
            for index in range(start, end):
                # The next token is loaded before this one's chain of sums, which takes longer.
                row = tl.minimum(index + 1, end - 1).to(tl.int64)
                next_query, next_key, next_value, next_beta, next_step = _token_of(
                    qkv + row * qkv_stride, gate + row * GATE_STRIDE, keys, values, NUM_KEY_HEADS * KEY_DIM, STEP_AT
                )
                state, query = _advanced(state, query, key, value, beta, step, rate, bias, skip is None, KEY_DIM, EPS)
                _store_mixed(target, state, query, value, skip, head)
                target += NUM_HEADS * VALUE_DIM
                query, key, value, beta, step = next_query, next_key, next_value, next_beta, next_step
        if is_kept & (block != 0):
            tl.store(place, state)


def _pointers(work: Recurrence) -> tuple[Tensor | None, ...]:
    """Return what the kernel reads of drafts: pending, kept, and the inputs of pending tokens."""
    pending, drafts = work.pending, work.batch.drafts
    if pending is None or drafts is None:
        return None, None, None, None
    assert pending.qkv.stride(0) == pending.gates.stride(0) == work.states.stride(0)
    return drafts.pending, drafts.kept, pending.qkv, pending.gates


def run_token_by_token(work: Recurrence, out: Tensor, longest: int = NO_LIMIT) -> None:
    """Write the outputs [T, value_size] of the sequences that have at most `longest` tokens in this step."""
    _launch(work, out, work.columns(_COLUMNS), _WARPS, longest, is_decode=False)


def has_decode_tiles(work: Recurrence) -> bool:
    """Whether each sequence has one token, and there are so many sequences that run_decode() is faster."""
    heads, sequences = work.heads, len(work.batch.state_blocks)
    return (
        work.batch.max_query_len == 1
        and work.columns(_DECODE_COLUMNS) == _DECODE_COLUMNS
        and sequences * heads.num_heads * heads.value_dim >= _DECODE_PROGRAMS * _DECODE_COLUMNS
    )


def run_decode(work: Recurrence, out: Tensor) -> None:
    """Write the outputs [T, value_size] of one token of each sequence, whose sums have another order."""
    _launch(work, out, _DECODE_COLUMNS, _DECODE_WARPS, 1, is_decode=True)


def _launch(work: Recurrence, out: Tensor, columns: int, num_warps: int, longest: int, *, is_decode: bool) -> None:
    heads, batch = work.heads, work.batch
    _recurrence_kernel[heads.value_dim // columns, heads.num_heads, len(batch.state_blocks)](
        work.qkv, work.gates, work.rates.decay, work.rates.step_bias, work.skip, out, work.states,
        batch.state_blocks, batch.query_start_loc, *_pointers(work), work.qkv.stride(0), work.states.stride(0),
        GATE_STRIDE=work.gates.stride(0), NUM_KEY_HEADS=heads.num_key_heads, NUM_HEADS=heads.num_heads,
        KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, VALUES=columns, LONGEST=longest, EPS=L2_EPS,
        IS_DECODE=is_decode, num_warps=num_warps, maxnreg=_MAX_REGISTERS, **dependent_launch(work.qkv),
    )  # fmt: skip
