"""Weights of all experts of a layer, and their exact values in plain torch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.moe.mxfp4 import Mxfp4Experts
from kernels.scaled import GROUP


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """fp8 weights; element = value * scale.

    Attributes:
        values: [E, N, K], float8_e4m3fn.
        scales: float32; [E, N] per row, or [E, N / 128 rounded up, K / 128] per block of 128 x 128.
    """

    values: Tensor
    scales: Tensor

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == 3

    def exact_weight(self) -> Tensor:
        """Return the exact weight, [E, N, K], float32."""
        if not self.is_grouped:
            return self.values.float() * self.scales[..., None]
        _, rows, inputs = self.values.shape
        scales = self.scales.repeat_interleave(GROUP, 1)[:, :rows].repeat_interleave(GROUP, 2)[..., :inputs]
        return self.values.float() * scales


ExpertWeight = Tensor | ScaledExperts | Mxfp4Experts  # Tensor: [E, N, K] of 16 or 32 bits


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of the two linear layers of all experts.

    Attributes:
        weight: Of N outputs and K inputs; gated: N = 2 * I, gate rows first.
        bias: [E, N] or None.
    """

    weight: ExpertWeight
    bias: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Return N."""
        weight = self.weight.values if isinstance(self.weight, ScaledExperts) else self.weight
        return weight.shape[1]


def exact_weight(weight: ExpertWeight, expert: int) -> Tensor:
    """Return the exact weight of one expert, [N, K]."""
    if isinstance(weight, Tensor):
        return weight[expert]
    one = slice(expert, expert + 1)
    return replace(weight, values=weight.values[one], scales=weight.scales[one]).exact_weight()[0]


def stacked(interleaved: Tensor) -> Tensor:
    """Return [E, 2 * I, ...] with all gate rows before all up rows, from alternate rows."""
    return torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1)
