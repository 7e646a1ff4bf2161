"""Load the mixer and the MLP of a layer: one line per kind of spec."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from engine_worker.model.devices import DeviceStep
from engine_worker.model.linear import Input
from engine_worker.model.parts.attention import load_attention
from engine_worker.model.parts.experts import load_mixture
from engine_worker.model.parts.gated_delta import load_gated_delta
from engine_worker.model.parts.mlp import load_dense_mlp
from engine_worker.model.parts.short_conv import load_short_conv
from engine_worker.model.parts.source import LayerSource
from engine_worker.model.parts.state_space import load_state_space
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.gated_delta import GatedDeltaSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.part import PartSpec
from engine_worker.model.specs.short_conv import ShortConvSpec
from engine_worker.model.specs.state_space import StateSpaceSpec
from kernels.scaled import Scaling


class Mixer(Protocol):
    """The part of a layer that reads other tokens."""

    scaling: Scaling  # of its inputs
    reads_plain: bool  # also reads them as they are

    def __call__(self, step: DeviceStep, x: Input, rows: Tensor | None = None) -> Tensor:
        """Return [N, H] for x [T, H]: the outputs of `rows`, or of all."""


class Mlp(Protocol):
    """The part of a layer that computes each token alone."""

    scaling: Scaling  # of its inputs
    reads_plain: bool  # also reads them as they are

    def __call__(self, x: Input) -> Tensor:
        """Return [T, H] for x [T, H]."""


_MIXERS: Mapping[type[PartSpec], Callable[[Any, LayerSource], Mixer]] = {
    AttentionSpec: load_attention,
    ShortConvSpec: load_short_conv,
    GatedDeltaSpec: load_gated_delta,
    StateSpaceSpec: load_state_space,
}
_MLPS: Mapping[type[PartSpec], Callable[[Any, LayerSource], Mlp]] = {
    MlpSpec: load_dense_mlp,
    ExpertsSpec: load_mixture,
}


def load_mixer(spec: PartSpec, source: LayerSource) -> Mixer:
    """Load the mixer of a layer.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    return _MIXERS[type(spec)](spec, source)


def load_mlp(spec: PartSpec, source: LayerSource) -> Mlp:
    """Load the MLP of a layer; raises as load_mixer()."""
    return _MLPS[type(spec)](spec, source)
