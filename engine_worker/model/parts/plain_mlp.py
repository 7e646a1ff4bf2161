"""An MLP without gates, with its linear layers."""

from torch import Tensor

from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.part import Role
from engine_worker.model.specs.plain_mlp import PlainMlpSpec


class PlainMlp:
    """down(relu(up(x)) ** 2)."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self._up, self._down = up, down
        self.scaling = up.scaling

    def __call__(self, x: Input) -> Tensor:
        return self._down(self._up(x).relu_().square_())


def load_plain_mlp(spec: PlainMlpSpec, source: LayerSource) -> PlainMlp:
    """Load an MLP.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    inner, hidden, names, prefix = spec.intermediate_size, source.norm.size, source.names, source.prefix
    up = LinearSpec(role=Role.UP, names=(prefix + names.up,), outputs=(inner,), inputs=hidden, bias=spec.bias)
    down = LinearSpec(
        role=Role.DOWN,
        names=(prefix + names.down,),
        outputs=(hidden,),
        inputs=inner,
        bias=spec.bias,
        is_summed=source.is_summed,
    )
    method, weights = source.method, source.weights
    return PlainMlp(method.load(up, weights), method.load(down, weights))
