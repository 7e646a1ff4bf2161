"""A gated short convolution with its linear layers: a mixer of a layer."""

from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.specs.part import Role
from engine_worker.model.specs.short_conv import ShortConvSpec


class ShortConv:
    """The convolution of one layer."""

    reads_plain = False

    def __init__(self, enter: Linear, weight: Tensor, bias: Tensor | None, leave: Linear, layers: range) -> None:
        """Hold the weights; weight is [C, width], and `layers` are those of the KV pool with the inputs."""
        self._enter, self._weight, self._bias, self._leave, self._layers = enter, weight, bias, leave, layers
        self.scaling = enter.scaling

    def __call__(self, step: DeviceStep, x: Input, rows: Tensor | None = None) -> Tensor:
        """Store the filters' inputs of all rows of x [T, H] and return the outputs [N, H] of `rows`, or of all."""
        factor, gate, value = self._enter(x).chunk(3, dim=1)
        mixed = step.convolutions.convolve((factor, gate, value), self._weight, self._bias, self._layers)
        return self._leave(mixed if rows is None else mixed[rows])


def load_short_conv(spec: ShortConvSpec, source: LayerSource) -> ShortConv:
    """Load a convolution.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    names, prefix, hidden, weights = source.names, source.prefix, source.norm.size, source.weights
    enter = LinearSpec(
        role=Role.QKV, names=(prefix + names.conv_in,), outputs=(spec.channels,) * 3, inputs=hidden, bias=spec.bias
    )
    leave = LinearSpec(
        role=Role.OUT, names=(prefix + names.conv_out,), outputs=(hidden,), inputs=spec.channels, bias=spec.bias
    )
    weight = weights.get(f"{prefix}{names.conv}.weight", (spec.channels, 1, spec.width))
    bias = weights.get(f"{prefix}{names.conv}.bias", (spec.channels,)) if spec.bias else None
    method = source.method
    loaded_enter, loaded_leave = method.load(enter, weights), method.load(leave, weights)
    return ShortConv(loaded_enter, weight.squeeze(1).contiguous(), bias, loaded_leave, source.cache_layers)
