"""A gated MLP with its linear layers."""

from torch import Tensor

from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.gated_mlp import GatedMlpSpec, GateSpec
from engine_worker.model.specs.part import Role


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, gate: GateSpec) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self.scaling = gate_up.scaling

    def __call__(self, x: Input) -> Tensor:
        return self._down(self._gate_up.gated(x, self._gate, self._down.scaling))


def load_gated_mlp(spec: GatedMlpSpec, source: LayerSource) -> GatedMlp:
    """Load a gated MLP.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    inner, hidden, names = spec.intermediate_size, source.norm.size, source.names
    gate_up = LinearSpec(
        role=Role.GATE_UP,
        names=tuple(source.prefix + name for name in names.gate_up),
        outputs=(inner, inner),
        inputs=hidden,
        bias=spec.bias,
    )
    down = LinearSpec(
        role=Role.DOWN,
        names=(source.prefix + names.down,),
        outputs=(hidden,),
        inputs=inner,
        bias=spec.bias,
        is_summed=source.is_summed,
    )
    method, weights = source.method, source.weights
    return GatedMlp(method.load(gate_up, weights), method.load(down, weights), spec.gate)
