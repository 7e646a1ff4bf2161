"""A Mamba-2 layer with its linear layers: a mixer of a layer."""

import torch
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.recurrent import StateSpaceWeights
from engine_worker.model.specs.part import Role
from engine_worker.model.specs.state_space import StateSpaceSpec
from kernels.recurrent.batch import StateHeads, StateRates


class StateSpace:
    """The state space of one layer."""

    reads_plain = False

    def __init__(self, enter: Linear, leave: Linear, weights: StateSpaceWeights, layer: int) -> None:
        """Hold the weights; `layer` is the layer's place in the state pool."""
        self._enter, self._leave, self._weights, self._layer = enter, leave, weights, layer
        self.scaling = enter.scaling

    def __call__(self, step: DeviceStep, x: Input, rows: Tensor | None = None) -> Tensor:
        """Update the states with all rows of x [T, H] and return the outputs [N, H] of `rows`, or of all."""
        entered, weights, scaling = self._enter(x), self._weights, self._leave.scaling
        return self._leave(step.recurrent.state_space(entered, weights, self._layer, scaling, rows))


def load_state_space(spec: StateSpaceSpec, source: LayerSource) -> StateSpace:
    """Load a layer.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    space, prefix, hidden, weights, method = (
        source.names.space, source.prefix, source.norm.size, source.weights, source.method,
    )  # fmt: skip
    channels, heads = sum(spec.convolved), (spec.num_heads,)
    order = _in_kernel_order(spec)
    enter = LinearSpec(
        role=Role.QKV,
        names=(prefix + space.enter,),
        outputs=(channels, spec.value_size, spec.num_heads),
        inputs=hidden,
        bias=spec.bias,
        row_order=torch.cat(
            (order + spec.value_size, torch.arange(spec.value_size), torch.arange(*heads) + sum(spec.outputs[:-1]))
        ),
    )
    leave = LinearSpec(
        role=Role.OUT,
        names=(prefix + space.out,),
        outputs=(hidden,),
        inputs=spec.value_size,
        bias=spec.bias,
        is_summed=source.is_summed,
    )
    filters = weights.get(f"{prefix}{space.conv}.weight", (channels, 1, spec.width)).squeeze(1)
    bias = weights.get(f"{prefix}{space.conv}.bias", (channels,)) if spec.conv_bias else None
    loaded = StateSpaceWeights(
        heads=StateHeads(spec.num_groups, spec.num_heads, spec.state_dim, spec.head_dim),
        conv=filters[order.to(filters.device)].t().float().contiguous(),
        conv_bias=None if bias is None else bias[order.to(bias.device)].float(),
        rates=StateRates(
            -weights.get(prefix + space.decay, heads, dtype=torch.float32).exp(),
            weights.get(prefix + space.step_bias, heads, dtype=torch.float32),
        ),
        skip=weights.get(prefix + space.skip, heads, dtype=torch.float32),
        norm=weights.get(f"{prefix}{space.norm}.weight", (spec.value_size,)).float(),
        eps=source.norm.eps,
    )
    return StateSpace(method.load(enter, weights), method.load(leave, weights), loaded, source.state_layer)


def _in_kernel_order(spec: StateSpaceSpec) -> Tensor:
    """Return the checkpoint's channel of each of C, B and x; it has x, B and C."""
    return torch.cat(torch.arange(sum(spec.convolved)).split(spec.convolved)[::-1])
