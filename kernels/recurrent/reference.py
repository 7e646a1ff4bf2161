"""The recurrent layers in torch: for a CPU without the C++ kernels, and as the reference of all kernels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.batch import PendingInputs, RecurrentBatch, StateHeads, StateRates
from kernels.scaled import Scaling

L2_EPS = 1e-6  # of queries and keys, as in fla-core


class TorchRecurrent:
    """RecurrentOperators in torch; computes in float32, or in float64 if the states are."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        width, out = len(weight), torch.empty_like(x)
        for own in _sequences(batch):
            history = states[own.block, : width - 1 + own.num_pending]
            inputs = torch.cat((history, x[own.tokens].to(states.dtype)))
            used, count = inputs[own.num_pending :], own.tokens.stop - own.tokens.start
            total = sum(used[tap : tap + count] * weight[tap] for tap in range(width))
            total = total if bias is None else total + bias
            assert isinstance(total, Tensor)
            out[own.tokens] = F.silu(total).to(x.dtype)
            if own.block:
                states[own.block, : width - 1] = inputs[own.num_kept : own.num_kept + width - 1]
        return out

    def keep_inputs(self, rows: Tensor, kept: Tensor, batch: RecurrentBatch) -> None:
        for own in _sequences(batch):
            if own.block and own.has_drafts:
                kept[own.block, : own.tokens.stop - own.tokens.start] = rows[own.tokens].to(kept.dtype)

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
        def terms(qkv: Tensor, gates: Tensor) -> _Terms:
            parts = qkv.to(states.dtype).split((heads.key_size, heads.key_size, heads.value_size), dim=1)
            query, key = (_normed(part, heads) for part in parts[:2])
            value = parts[2].unflatten(1, (heads.num_heads, heads.value_dim))
            beta, step = gates.to(states.dtype).chunk(2, dim=1)
            factor = torch.exp(rates.decay * F.softplus(step + rates.step_bias))
            return _Terms(query * heads.key_dim**-0.5, key, value, factor, torch.sigmoid(beta))

        def advance(state: Tensor, of: _Terms, token: int) -> tuple[Tensor, Tensor]:
            state = state * of.factor[token, :, None, None]
            known = (state * of.key[token, :, :, None]).sum(1)
            change = (of.value[token] - known) * of.share[token, :, None]
            state = state + of.key[token, :, :, None] * change[:, None, :]
            return state, (state * of.query[token, :, :, None]).sum(1)

        return _run(qkv, gates, states, batch, pending, terms, advance)

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
        def terms(qkv: Tensor, step: Tensor) -> _Terms:
            query, key, value = qkv.to(states.dtype).split((heads.key_size, heads.key_size, heads.value_size), dim=1)
            query, key = (_by_value_head(part, heads) for part in (query, key))
            value = value.unflatten(1, (heads.num_heads, heads.value_dim))
            share = F.softplus(step.to(states.dtype) + rates.step_bias)
            return _Terms(query, key, value, torch.exp(rates.decay * share), share)

        def advance(state: Tensor, of: _Terms, token: int) -> tuple[Tensor, Tensor]:
            written = of.value[token] * of.share[token, :, None]
            state = state * of.factor[token, :, None, None] + of.key[token, :, :, None] * written[:, None, :]
            return state, (state * of.query[token, :, :, None]).sum(1) + skip[:, None] * of.value[token]

        return _run(qkv, step, states, batch, pending, terms, advance)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, scaling: Scaling = Scaling.NONE
    ) -> Tensor:
        assert scaling is Scaling.NONE
        exact = x.to(weight.dtype).unflatten(1, (-1, len(weight)))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight
        gated: Tensor = normed.flatten(1) * F.silu(gate.to(weight.dtype))
        return gated.to(x.dtype)

    def rms_norm_of_gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, scaling: Scaling = Scaling.NONE
    ) -> Tensor:
        assert scaling is Scaling.NONE
        exact: Tensor = (x.to(weight.dtype) * F.silu(gate.to(weight.dtype))).unflatten(1, (num_groups, -1))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        weighted: Tensor = normed.flatten(1) * weight
        return weighted.to(dtype=x.dtype)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert scaling is Scaling.NONE
        return x * torch.sigmoid(gate)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What the rule of a layer makes of some tokens, [tokens, heads, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor
    factor: Tensor  # of the state
    share: Tensor  # of what is written


def _run(
    qkv: Tensor,
    gates: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
    pending: PendingInputs | None,
    terms: Callable[[Tensor, Tensor], _Terms],
    advance: Callable[[Tensor, _Terms, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """Run a rule: `advance` returns the state after a token, and the token's output."""
    new = terms(qkv, gates)
    out = torch.empty_like(new.value)
    for own in _sequences(batch):
        state = states[own.block]
        if pending is not None and own.num_pending:
            old = terms(pending.qkv[own.block, : own.num_pending], pending.gates[own.block, : own.num_pending])
            for token in range(own.num_pending):
                state, _ = advance(state, old, token)
        kept = state
        for token in range(own.tokens.start, own.tokens.stop):
            state, out[token] = advance(state, new, token)
        if own.block:
            states[own.block] = kept if own.has_drafts else state
    return out.flatten(1).to(qkv.dtype)


def _normed(x: Tensor, heads: StateHeads) -> Tensor:
    """Return [T, num_heads, key_dim] of length 1, one per value head."""
    split = _by_value_head(x, heads)
    normed: Tensor = split * torch.rsqrt(split.square().sum(-1, keepdim=True) + L2_EPS)
    return normed


def _by_value_head(x: Tensor, heads: StateHeads) -> Tensor:
    """Return [T, num_heads, key_dim] of queries or keys [T, key_size]."""
    split = x.unflatten(1, (heads.num_key_heads, heads.key_dim))
    spread: Tensor = split.repeat_interleave(heads.num_heads // heads.num_key_heads, dim=1)
    return spread


@dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: slice
    block: int  # of its state
    num_pending: int
    num_kept: int  # tokens after which the state is kept, pending ones first
    has_drafts: bool


def _sequences(batch: RecurrentBatch) -> Iterator[_Sequence]:
    """Yield the sequences that have tokens."""
    starts, drafts = batch.query_start_loc.tolist(), batch.drafts
    for row, block in enumerate(batch.state_blocks.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start < tokens.stop:
            count = tokens.stop - tokens.start
            pending, kept = (int(drafts.pending[row]), int(drafts.kept[row])) if drafts is not None else (0, count)
            yield _Sequence(tokens, block, pending, kept, kept < pending + count)
