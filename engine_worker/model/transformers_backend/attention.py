"""This engine's attention as transformers calls it: one registered function that delegates to the calling module.

A serving module has a LayerAttention in its attribute `paged_attention`, so nothing is global and models pass nothing
through their layers. Queries are [1, Hq, T, D], keys and values [1, Hkv, T, D], the new tokens of all sequences packed;
the result is [1, T, Hq, D].
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine_worker.model.devices import DeviceStep
from kernels.attention.score_rules import NO_RULES, ScoreRules


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention functions; weights are not returned."""
    return module.paged_attention(query, key, value, attention_mask, **options), None


class CurrentStep:
    """The operators of the running step of one network; empty between steps."""

    def __init__(self) -> None:
        self.operators: DeviceStep | None = None


class LayerAttention:
    """Attention of one layer."""

    def __init__(self, step: CurrentStep, layer: int, dtype: torch.dtype, rules: ScoreRules = NO_RULES) -> None:
        """Hold the layer; attention computes in `dtype`, that of the weights."""
        self._step, self._layer, self._dtype, self._rules = step, layer, dtype, rules

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Store keys and values and attend; probe.py has checked `options`, and rules contain what changes scores."""
        operators = self._step.operators
        assert operators is not None, "attention outside a step"
        heads = torch.cat([part[0].transpose(0, 1) for part in (query, key, value)], dim=1).to(self._dtype)
        num_heads, head_dim = query.shape[1], query.shape[3]
        qkv = heads.flatten(1)
        operators.store(qkv, self._layer)
        scale = head_dim**-0.5 if scaling is None else scaling
        attended = operators.attend(qkv, scale, self._layer, rules=self._rules)
        return attended.view(1, len(heads), num_heads, head_dim)
