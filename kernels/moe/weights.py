"""Weights of all experts of a layer, and their exact values in plain torch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.moe.mxfp4 import Mxfp4Experts
from kernels.scaled import GROUP

MIDDLE = 8  # zero point of symmetric weights


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


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """4-bit integer weights with a scale per group of inputs; element = (value - zero) * scale.

    Attributes:
        values: [E, N, K / group, group / 2], uint8; byte j of a group has input j in its low bits, and input
            group / 2 + j in its high ones.
        scales: [E, K / group, N], float16, bfloat16 or float32.
        zeros: [E, K / group, N], uint8; None: 8.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def group(self) -> int:
        """Return the inputs per scale."""
        return 2 * self.values.shape[3]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def exact_weight(self) -> Tensor:
        """Return the exact weight, [E, N, K], float32."""
        integers = torch.cat((self.values & 15, self.values >> 4), -1).float()
        zeros = MIDDLE if self.zeros is None else self.zeros.float().mT[..., None]
        exact: Tensor = ((integers - zeros) * self.scales.float().mT[..., None]).flatten(2)
        return exact


def pack_int4(values: Tensor, group: int) -> Tensor:
    """Return the bytes of Int4Experts for values [..., K], uint8, 0 to 15."""
    halves = values.unflatten(-1, (-1, 2, group // 2))
    packed: Tensor = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed


ExpertWeight = Tensor | ScaledExperts | Int4Experts | Mxfp4Experts  # Tensor: [E, N, K] of 16 or 32 bits


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """One of the two linear layers of all experts.

    Attributes:
        weight: Of N outputs and K inputs; with a gate: N = 2 * I, gate rows first.
        bias: [E, N] or None.
    """

    weight: ExpertWeight
    bias: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """Return N."""
        weight = self.weight.values if isinstance(self.weight, ScaledExperts | Int4Experts) else self.weight
        return weight.shape[1]


def exact_weight(weight: ExpertWeight, expert: int) -> Tensor:
    """Return the exact weight of one expert, [N, K]."""
    if isinstance(weight, Tensor):
        return weight[expert]
    one = slice(expert, expert + 1)
    part = replace(weight, values=weight.values[one], scales=weight.scales[one])
    if isinstance(part, Int4Experts) and part.zeros is not None:
        part = replace(part, zeros=part.zeros[one])
    return part.exact_weight()[0]


def stacked(interleaved: Tensor) -> Tensor:
    """Return [E, 2 * I, ...] with all gate rows before all up rows, from alternate rows."""
    return torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), dim=1)
