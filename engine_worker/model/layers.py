"""Parts of the network that are the same on all devices.

They are plain callables instead of nn.Module: a module call costs 1-2 us, and a decode step on a CPU makes 211.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.model.linear import Linear, LinearMethod, LinearSpec, Role
from engine_worker.model.rotary import query_scales, rotary_order, rotary_table
from engine_worker.model.spec import AttentionSpec, NamesSpec, QkNorm, RopeSpec
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import WeightSource
from kernels.attention.score_rules import NO_RULES, ScoreRules


class NormWeight:
    """The weight of one RMSNorm, with constants that a CPU would otherwise compute for every token.

    x / sqrt(mean(x^2) + eps) * weight = x / hypot(norm(x), sqrt(H * eps)) * (sqrt(H) * weight)
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.scaled_weight = weight.float() * math.sqrt(len(weight))
        self.scaled_eps = torch.tensor(math.sqrt(len(weight) * eps), device=weight.device)


class NormOverRanks(NormWeight):
    """An RMSNorm over elements that are distributed evenly over the ranks, or replicated."""

    def __init__(self, weight: Tensor, eps: float, ranks: TensorParallel) -> None:
        super().__init__(weight, eps)
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        mean = self._ranks.all_reduce_in_order(exact.square().mean(-1, keepdim=True)) / self._ranks.size
        return (exact * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class NormShape:
    """What the norms of a network share; norms over all heads span the ranks."""

    size: int
    eps: float
    ranks: TensorParallel = SINGLE
    offset: float = 0.0  # added to the checkpoint's weights

    def weight(self, stored: Tensor) -> NormWeight:
        return NormWeight(self.actual(stored), self.eps)

    def actual(self, stored: Tensor) -> Tensor:
        """Return the actual weight, in float32 if there is an offset: 1 + w in 16 bits would lose bits of w."""
        return stored.float() + self.offset if self.offset else stored


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """One rotary table of a network."""

    index: int
    cos_sin: Tensor  # [max_len, D] float32
    query_scales: Tensor | None = None  # [max_len] float32

    @classmethod
    def of(cls, index: int, rope: RopeSpec, head_dim: int, max_len: int, device: torch.device) -> "RotaryTable":
        """Compute the table of `rope`, the network's rotation number `index`."""
        scales = query_scales(rope, max_len)
        table = rotary_table(rope, head_dim, max_len).to(device)
        return cls(index, table, None if scales is None else scales.to(device))


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention between a layer's norms: linear layers, rotation, query and key norms."""

    spec: AttentionSpec
    table: RotaryTable  # layers with the same rotation share it
    qkv: Linear
    out: Linear
    query_norm: NormWeight | None
    key_norm: NormWeight | None
    rules: ScoreRules = NO_RULES


def load_attention(
    source: WeightSource,
    method: LinearMethod,
    names: NamesSpec,
    prefix: str,
    spec: AttentionSpec,
    norm: NormShape,
    table: RotaryTable,
    is_out_summed: bool = True,
) -> AttentionWeights:
    """Load attention weights, with query and key rows, biases and norms in the order of rotary.py.

    Args:
        source: The checkpoint.
        method: Loads linear layers.
        names: Names of the checkpoint's tensors.
        prefix: Prefix of the layer's names.
        spec: The attention of the layer.
        norm: What the norms share.
        table: Rotary table of the layer.
        is_out_summed: See LinearSpec.is_summed.
    """
    order = rotary_order(spec.rope, spec.head_dim)
    qkv = LinearSpec(
        role=Role.QKV,
        names=tuple(prefix + name for name in names.qkv),
        outputs=(spec.query_size, spec.kv_size, spec.kv_size),
        inputs=norm.size,
        bias=spec.qkv_bias,
        row_order=None if order is None else _row_order(spec, order),
    )
    out = LinearSpec(
        role=Role.OUT,
        names=(prefix + names.out,),
        outputs=(norm.size,),
        inputs=spec.query_size,
        bias=spec.out_bias,
        is_summed=is_out_summed,
    )
    return AttentionWeights(
        spec=spec,
        table=table,
        qkv=method.load(qkv, source),
        out=method.load(out, source),
        query_norm=_qk_norm(source, f"{prefix}{names.query_norm}.weight", spec, spec.num_heads, norm, order),
        key_norm=_qk_norm(source, f"{prefix}{names.key_norm}.weight", spec, spec.num_kv_heads, norm, order),
        rules=ScoreRules(spec.window, spec.softcap, _sinks(source, prefix + names.sinks, spec)),
    )


def _sinks(source: WeightSource, name: str, spec: AttentionSpec) -> Tensor | None:
    """Return the sinks [Hq] in float32, as the C++ kernels read them."""
    return source.get(name, (spec.num_heads,)).float() if spec.sinks else None


def _row_order(spec: AttentionSpec, order: Tensor) -> Tensor:
    """Return [(Hq + 2 Hkv) * D]: `order` in each query and key head, identity for values."""
    rows = torch.arange(spec.query_size + 2 * spec.kv_size).view(-1, spec.head_dim)
    rows[: -spec.num_kv_heads] = rows[: -spec.num_kv_heads, order]
    return rows.flatten()


def _qk_norm(
    source: WeightSource, name: str, spec: AttentionSpec, num_heads: int, norm: NormShape, order: Tensor | None
) -> NormWeight | None:
    if spec.qk_norm is QkNorm.NONE:
        return None
    heads = 1 if spec.qk_norm is QkNorm.HEAD else num_heads
    weight = source.get(name, (heads * spec.head_dim,))
    if order is not None:
        weight = weight.view(heads, -1)[:, order.to(weight.device)].flatten()
    if spec.qk_norm is QkNorm.WHOLE and norm.ranks.size > 1:
        return NormOverRanks(norm.actual(weight), norm.eps, norm.ranks)
    return norm.weight(weight)
