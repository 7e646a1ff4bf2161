"""Parts of the network that are the same on every device but for the layout of their weights.

Plain callables, not nn.Module: a module's call costs 1-2 us and a decode step on a CPU makes 211 of them.

The parts are made once, at a worker's start; network.py walks through them in every step. The parts know no sequences.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.model.linear import Linear, LinearMethod, LinearSpec, Role
from engine_worker.model.rotary import rotary_order
from engine_worker.model.spec import AttentionSpec, NamesSpec, QkNorm
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import WeightSource
from kernels.attention.score_rules import NO_RULES, ScoreRules


class NormWeight:
    """The scale of one RMSNorm, and the constants that a CPU would compute again for every token.

    x / sqrt(mean(x^2) + eps) * weight = x / hypot(norm(x), sqrt(H * eps)) * (sqrt(H) * weight)
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.scaled_weight = weight.float() * math.sqrt(len(weight))
        self.scaled_eps = torch.tensor(math.sqrt(len(weight) * eps), device=weight.device)


class NormOverRanks(NormWeight):
    """The scale of an RMSNorm over elements of which every rank has equally many, some perhaps as others have them."""

    def __init__(self, weight: Tensor, eps: float, ranks: TensorParallel) -> None:
        super().__init__(weight, eps)
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        mean = self._ranks.all_reduce_in_order(exact.square().mean(-1, keepdim=True)) / self._ranks.size
        return (exact * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class NormShape:
    """The norms of a network share these; norms over all heads span the ranks."""

    size: int
    eps: float
    ranks: TensorParallel = SINGLE
    offset: float = 0.0  # added to the checkpoint's weights

    def weight(self, stored: Tensor) -> NormWeight:
        return NormWeight(self.actual(stored), self.eps)

    def actual(self, stored: Tensor) -> Tensor:
        """In float32 where there is an offset: 16 bits of 1 + w are fewer of w."""
        return stored.float() + self.offset if self.offset else stored


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """One of the rotary tables of a network."""

    index: int
    cos_sin: Tensor  # [max_len, D] float32


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention between a layer's norms: products, rotation, norms of queries and keys."""

    spec: AttentionSpec
    rope_index: int  # layers of one network whose positions turn alike have the same one, and the same table
    cos_sin_table: Tensor  # [max_len, D] float32
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
    """Rows of queries and keys are put into the order of rotary.py, with their biases and norms.

    `is_out_summed`: see LinearSpec.
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
        rope_index=table.index,
        cos_sin_table=table.cos_sin,
        qkv=method.load(qkv, source),
        out=method.load(out, source),
        query_norm=_qk_norm(source, f"{prefix}{names.query_norm}.weight", spec, spec.num_heads, norm, order),
        key_norm=_qk_norm(source, f"{prefix}{names.key_norm}.weight", spec, spec.num_kv_heads, norm, order),
        rules=ScoreRules(spec.window, spec.softcap),
    )


def _row_order(spec: AttentionSpec, order: Tensor) -> Tensor:
    """[(Hq + 2 Hkv) * D]: `order` within every query and key head, values as they are."""
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
