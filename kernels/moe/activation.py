"""The activation between the two linear layers of an expert, in torch and inside kernels.

Outputs of the first layer are rounded to the output's type first, as if they had been stored. The result is computed in
float32.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gate:
    """gate * sigmoid(alpha * gate) * (up + up_offset), or gelu_tanh(gate) * (up + up_offset).

    Attributes:
        kind: Gate function.
        alpha: Factor inside the sigmoid of silu.
        limit: gate <= limit and -limit <= up <= limit; 0: no limit.
        up_offset: Added to up.
    """

    kind: Literal["silu", "gelu_tanh"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0


@dataclass(frozen=True)
class SquaredRelu:
    """relu(up) ** 2, without a gate (https://arxiv.org/abs/2109.08668)."""


Activation = Gate | SquaredRelu


def activated_reference(outputs: Tensor, activation: Activation) -> Tensor:
    """Return [..., I] of the outputs of the first layer, in their dtype, computed in float32 or float64.

    Args:
        outputs: Of a gate: gate and up, [..., 2 * I]; otherwise [..., I].
        activation: What is computed.
    """
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if isinstance(activation, SquaredRelu):
        return wide.relu().square().to(outputs.dtype)
    return _gated(wide, activation).to(outputs.dtype)


def _gated(wide: Tensor, gate: Gate) -> Tensor:
    gates, up = wide.chunk(2, dim=-1)
    if gate.limit:
        gates, up = gates.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.kind == "gelu_tanh":
        gates = torch.nn.functional.gelu(gates, approximate="tanh")
    else:
        gates = gates * torch.sigmoid(gate.alpha * gates)
    return gates * (up + gate.up_offset)


def num_halves(activation: Activation | None) -> int:
    """Return how many outputs of a product make one activated output."""
    return 2 if isinstance(activation, Gate) else 1


def launch_options(activation: Activation | None) -> dict[str, bool | float]:
    """Return the launch arguments of a product's activation; None: a plain product, the second one."""
    rule = activation if isinstance(activation, Gate) else Gate()
    return {
        "GATED": isinstance(activation, Gate),
        "SQUARED": isinstance(activation, SquaredRelu),
        "IS_GELU": rule.kind == "gelu_tanh",
        "ALPHA": rule.alpha,
        "LIMIT": rule.limit,
        "UP_OFFSET": rule.up_offset,
    }


@triton.jit
def apply_gate(
    gate, up, IS_GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """Return the gated float32 value of float32 gate and up."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z, with z = sqrt(2 / pi) * (x + 0.044715 x^3).
    argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else ALPHA * gate
    return gate / (1.0 + tl.exp(-argument)) * (up + UP_OFFSET)


@triton.jit
def squared_relu(up):
    """Return relu(up) ** 2 of float32 up."""
    positive = tl.maximum(up, 0.0)
    return positive * positive
