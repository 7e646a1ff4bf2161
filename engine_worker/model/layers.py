"""Parts of the network that are the same on all devices.

They are plain callables instead of nn.Module: a module call costs 1-2 us, and a decode step on a CPU makes 211.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.model.linear import Linear
from engine_worker.model.rotary import query_scales, rotary_table
from engine_worker.model.specs.attention import AttentionSpec, RopeSpec
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
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
