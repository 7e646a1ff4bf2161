"""A Gated DeltaNet layer with its linear layers: a mixer of a layer."""

from functools import partial

import torch
from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.linear import Input, Linear, LinearSpec
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.recurrent import GatedDeltaWeights
from engine_worker.model.specs.gated_delta import GatedDeltaSpec
from engine_worker.model.specs.part import Role
from kernels.recurrent.batch import StateHeads, StateRates
from kernels.scaled import plain_rows
from kernels.side_stream import side_by_side


class GatedDelta:
    """The gated delta rule of one layer."""

    def __init__(self, enter: Linear, gates: Linear, leave: Linear, weights: GatedDeltaWeights, layer: int) -> None:
        """Hold the weights; `layer` is the layer's place in the state pool."""
        self._enter, self._gates, self._leave, self._weights, self._layer = enter, gates, leave, weights, layer
        self.scaling = enter.scaling
        self.reads_plain = gates.scaling is not enter.scaling  # a checkpoint may leave the small gates unquantized

    def __call__(self, step: DeviceStep, x: Input, rows: Tensor | None = None) -> Tensor:
        """Update the states with all rows of x [T, H] and return the outputs [N, H] of `rows`, or of all."""
        of_gates = plain_rows(x) if self.reads_plain else x
        entered, gates = side_by_side(partial(self._enter, x), partial(self._gates, of_gates), x.device)
        weights, scaling = self._weights, self._leave.scaling
        return self._leave(step.recurrent.gated_delta(entered, gates, weights, self._layer, scaling, rows))


def load_gated_delta(spec: GatedDeltaSpec, source: LayerSource) -> GatedDelta:
    """Load a layer.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    delta, prefix, hidden, weights, method = (
        source.names.delta, source.prefix, source.norm.size, source.weights, source.method,
    )  # fmt: skip
    qkv, z, *gates = spec.outputs
    names = tuple(prefix + name for name in delta.enter)
    half = len(names) // 2
    enter = LinearSpec(
        role=Role.QKV, names=names[:half], outputs=(qkv, z), inputs=hidden, bias=False, row_order=_input_order(spec)
    )
    gate = LinearSpec(
        role=Role.QKV, names=names[half:], outputs=tuple(gates), inputs=hidden, bias=False, row_order=_gate_order(spec)
    )
    leave = LinearSpec(
        role=Role.OUT,
        names=(prefix + delta.out,),
        outputs=(hidden,),
        inputs=spec.value_size,
        bias=False,
        is_summed=source.is_summed,
    )
    heads = (spec.num_heads,)
    loaded = GatedDeltaWeights(
        heads=StateHeads(spec.num_key_heads, spec.num_heads, spec.key_dim, spec.value_dim),
        conv=weights.get(f"{prefix}{delta.conv}.weight", (spec.channels, 1, spec.width))
        .squeeze(1)
        .t()
        .float()
        .contiguous(),
        rates=StateRates(
            -weights.get(prefix + delta.decay, heads, dtype=torch.float32).exp(),
            weights.get(prefix + delta.step_bias, heads, dtype=torch.float32),
        ),
        norm=weights.get(f"{prefix}{delta.norm}.weight", (spec.value_dim,)).float(),
        eps=source.norm.eps,
    )
    return GatedDelta(
        method.load(enter, weights), method.load(gate, weights), method.load(leave, weights), loaded, source.state_layer
    )


def _input_order(spec: GatedDeltaSpec) -> Tensor | None:
    """Return the checkpoint's rows of all queries, keys, values and gates; None: they are in this order."""
    group = spec.num_heads // spec.num_key_heads * spec.value_dim
    return _in_parts((spec.key_dim, spec.key_dim, group, group), spec)


def _gate_order(spec: GatedDeltaSpec) -> Tensor | None:
    group = spec.num_heads // spec.num_key_heads
    return _in_parts((group, group), spec)


def _in_parts(sizes: tuple[int, ...], spec: GatedDeltaSpec) -> Tensor | None:
    """Return the rows of each part of all key heads in turn, from rows that have all parts of one head in turn."""
    if not spec.interleaved:
        return None
    rows = torch.arange(sum(sizes) * spec.num_key_heads).view(spec.num_key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
