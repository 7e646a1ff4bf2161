"""An MLP with its linear layers."""

from torch import Tensor

from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.mlp import GateSpec, MlpSpec
from engine_worker.model.specs.part import Role


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    reads_plain = False

    def __init__(self, gate_up: Linear, down: Linear, gate: GateSpec) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self.scaling = gate_up.scaling

    def __call__(self, x: Input) -> Tensor:
        return self._down(self._gate_up.gated(x, self._gate, self._down.scaling))


class PlainMlp:
    """down(relu(up(x)) ** 2)."""

    reads_plain = False

    def __init__(self, up: Linear, down: Linear) -> None:
        self._up, self._down = up, down
        self.scaling = up.scaling

    def __call__(self, x: Input) -> Tensor:
        return self._down(self._up(x).relu_().square_())


DenseMlp = GatedMlp | PlainMlp


def load_dense_mlp(spec: MlpSpec, source: LayerSource) -> DenseMlp:
    """Load an MLP.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    first, down = (source.method.load(linear, source.weights) for linear in linears_of(spec, source))
    return PlainMlp(first, down) if spec.gate is None else GatedMlp(first, down, spec.gate)


def linears_of(spec: MlpSpec, source: LayerSource) -> tuple[LinearSpec, LinearSpec]:
    """Return the first layer and down."""
    role, outputs = spec.entry
    first = LinearSpec(
        role=role,
        names=tuple(source.prefix + name for name in source.names.gate_up),
        outputs=outputs,
        inputs=source.norm.size,
        bias=spec.bias,
    )
    down = LinearSpec(
        role=Role.DOWN,
        names=(source.prefix + source.names.down,),
        outputs=(source.norm.size,),
        inputs=spec.intermediate_size,
        bias=spec.bias,
        is_summed=source.is_summed,
    )
    return first, down
