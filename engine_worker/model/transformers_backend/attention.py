"""This engine's attention as transformers calls it: one registered function that asks the calling module.

    paged_attention(module, query, key, value, ...)     what is registered, for all models and steps
    module.paged_attention                              set on the modules that call it: a LayerAttention when serving
    CurrentStep                                         of one network: the operators of the step that is running

So nothing is global, and a model need not hand anything through its layers. Queries are [1, Hq, T, D], keys and values
[1, Hkv, T, D]: the new tokens of all sequences, packed; the answer is [1, T, Hq, D]. It is on a block's walk, where a
layer of such a model reads it. It knows no model and no weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine_worker.model.devices import DeviceStep
from kernels.attention.score_rules import NO_RULES, ScoreRules


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The signature of every entry in transformers' table of attention functions; no weights are answered."""
    return module.paged_attention(query, key, value, attention_mask, **options), None


class CurrentStep:
    """Empty between steps."""

    def __init__(self) -> None:
        self.operators: DeviceStep | None = None


class LayerAttention:
    def __init__(self, step: CurrentStep, layer: int, dtype: torch.dtype, rules: ScoreRules = NO_RULES) -> None:
        """`dtype`: of the weights, in which attention computes whatever the layer left its queries in."""
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
        """`options` were looked at before the weights were loaded (probe.py): what changes scores is in the rules."""
        operators = self._step.operators
        assert operators is not None, "attention outside a step"
        heads = torch.cat([part[0].transpose(0, 1) for part in (query, key, value)], dim=1).to(self._dtype)
        num_heads, head_dim = query.shape[1], query.shape[3]
        qkv = heads.flatten(1)
        operators.store(qkv, self._layer)
        scale = head_dim**-0.5 if scaling is None else scaling
        attended = operators.attend(qkv, scale, self._layer, rules=self._rules)
        return attended.view(1, len(heads), num_heads, head_dim)
