"""A linear layer with weights in groups of 32 inputs, on a CPU (kernels/cpu/linear.py)."""

import math

from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Input
from engine_worker.model.specs.mlp import GateKind, GateSpec
from kernels.cpu.linear import NO_LIMITS, Gate, GateLimits, PackedLinear
from kernels.cpu.step import DTYPES
from kernels.scaled import Scaling

_GATES = {GateKind.SILU: Gate.SILU, GateKind.GELU_TANH: Gate.GELU_TANH}


class GroupedLinear:
    scaling: Scaling = Scaling.NONE  # rows are quantized by the kernel: 0.4 us per row of 576

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self.packed(served(x)).to(x.dtype)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        form, limits = gate_of(gate)
        return self.packed(served(x), gate=form, limits=limits).to(x.dtype)


def gate_of(gate: GateSpec) -> tuple[Gate, GateLimits]:
    """Return what the kernels call this gate; SiLU may have limits."""
    if gate.is_plain:
        return _GATES[gate.kind], NO_LIMITS
    assert gate.kind is GateKind.SILU, f"no model limits {gate.kind}"
    return Gate.LIMITED_SILU, GateLimits(gate.alpha, gate.limit or math.inf, gate.up_offset)


def served(x: Tensor) -> Tensor:
    """Return x in a dtype that the kernels read."""
    return x if x.dtype in DTYPES else x.float()
