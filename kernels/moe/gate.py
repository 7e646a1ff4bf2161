"""The gate function of gated experts, in torch and inside kernels.

Gate and up are rounded to the output's type first, as if they had been stored. The result is computed in float32.
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


def gated_reference(gate_up: Tensor, gate: Gate) -> Tensor:
    """Return the gated half of gate_up [..., 2 * I], dtype of gate_up, computed in float32 or float64."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gates, up = wide.chunk(2, dim=-1)
    if gate.limit:
        gates, up = gates.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.kind == "gelu_tanh":
        gates = torch.nn.functional.gelu(gates, approximate="tanh")
    else:
        gates = gates * torch.sigmoid(gate.alpha * gates)
    return (gates * (up + gate.up_offset)).to(gate_up.dtype)


def launch_options(gate: Gate | None) -> dict[str, bool | float]:
    """Return the launch arguments of a product's gate; None: a plain product."""
    rule = gate or Gate()
    return {
        "GATED": gate is not None,
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
