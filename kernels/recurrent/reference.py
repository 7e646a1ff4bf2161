"""The recurrent layers in torch: for a CPU without the C++ kernels, and as the reference of all kernels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.recurrent.batch import RecurrentBatch, StateHeads, StateRates

L2_EPS = 1e-6  # of queries and keys, as in fla-core


class TorchRecurrent:
    """RecurrentOperators in torch; computes in float32, or in float64 if the states are."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        width, out = len(weight), torch.empty_like(x)
        for tokens, block in _sequences(batch):
            inputs = torch.cat((states[block], x[tokens].to(states.dtype)))
            count = len(inputs) - width + 1
            total = sum(inputs[tap : tap + count] * weight[tap] for tap in range(width))
            total = total if bias is None else total + bias
            assert isinstance(total, Tensor)
            out[tokens] = F.silu(total).to(x.dtype)
            if block:
                states[block] = inputs[count:]
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        rates: StateRates,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
    ) -> Tensor:
        parts = qkv.to(states.dtype).split((heads.key_size, heads.key_size, heads.value_size), dim=1)
        query, key = (_normed(part, heads) for part in parts[:2])
        query = query * heads.key_dim**-0.5
        value = parts[2].unflatten(1, (heads.num_heads, heads.value_dim))
        beta, step = gates.to(states.dtype).chunk(2, dim=1)
        factor, share = torch.exp(rates.decay * F.softplus(step + rates.step_bias)), torch.sigmoid(beta)
        out = torch.empty_like(value)
        for tokens, block in _sequences(batch):
            state = states[block].clone()
            for token in range(tokens.start, tokens.stop):
                state *= factor[token, :, None, None]
                known = (state * key[token, :, :, None]).sum(1)
                change = (value[token] - known) * share[token, :, None]
                state += key[token, :, :, None] * change[:, None, :]
                out[token] = (state * query[token, :, :, None]).sum(1)
            if block:
                states[block] = state
        return out.flatten(1).to(qkv.dtype)

    def state_space(
        self,
        qkv: Tensor,
        step: Tensor,
        rates: StateRates,
        skip: Tensor,
        states: Tensor,
        heads: StateHeads,
        batch: RecurrentBatch,
    ) -> Tensor:
        query, key, value = qkv.to(states.dtype).split((heads.key_size, heads.key_size, heads.value_size), dim=1)
        query, key = (_by_value_head(part, heads) for part in (query, key))
        value = value.unflatten(1, (heads.num_heads, heads.value_dim))
        share = F.softplus(step.to(states.dtype) + rates.step_bias)
        factor, out = torch.exp(rates.decay * share), torch.empty_like(value)
        for tokens, block in _sequences(batch):
            state = states[block].clone()
            for token in range(tokens.start, tokens.stop):
                written = value[token] * share[token, :, None]
                state = state * factor[token, :, None, None] + key[token, :, :, None] * written[:, None, :]
                out[token] = (state * query[token, :, :, None]).sum(1) + skip[:, None] * value[token]
            if block:
                states[block] = state
        mixed: Tensor = out.flatten(1).to(qkv.dtype)
        return mixed

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(weight.dtype).unflatten(1, (-1, len(weight)))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight
        gated: Tensor = normed.flatten(1) * F.silu(gate.to(weight.dtype))
        return gated.to(x.dtype)

    def rms_norm_of_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
        exact: Tensor = (x.to(weight.dtype) * F.silu(gate.to(weight.dtype))).unflatten(1, (num_groups, -1))
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        weighted: Tensor = normed.flatten(1) * weight
        return weighted.to(dtype=x.dtype)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate)


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


def _sequences(batch: RecurrentBatch) -> Iterator[tuple[slice, int]]:
    """Yield the tokens and the state block of each sequence that has tokens."""
    starts = batch.query_start_loc.tolist()
    for row, block in enumerate(batch.state_blocks.tolist()):
        if starts[row + 1] > starts[row]:
            yield slice(starts[row], starts[row + 1]), block
