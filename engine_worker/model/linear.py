"""Linear layers of a network, independent of how weights are stored and multiplied.

A layer states what it multiplies and the names in the checkpoint. Only the LinearMethod (quantization/) knows how
weights are fused, packed, scaled or tiled. `Linear.scaling` tells how a layer quantizes its inputs, so that whatever
computes them can quantize them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, Self

from torch import Tensor

from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.specs.names import ExpertNames
from engine_worker.model.specs.part import Role
from engine_worker.model.weights import WeightSource
from kernels.scaled import Scaled, Scaling

NOTHING_QUANTIZED = "this layer does not take quantized inputs"
Input = Tensor | Scaled  # plain, or quantized as the layer requires


class Split(StrEnum):
    """The dimension of a weight that is split over ranks."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"  # the output is a sum over ranks


SPLITS = {
    Role.QKV: Split.OUTPUTS, Role.OUT: Split.INPUTS, Role.GATE_UP: Split.OUTPUTS, Role.UP: Split.OUTPUTS,
    Role.DOWN: Split.INPUTS,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One linear layer, x [T, inputs] -> [T, sum(outputs)].

    Attributes:
        role: Which layer of a block it is.
        names: Tensor names without `.weight`: one fused tensor, or one per entry of `outputs`.
        outputs: Outputs of each part.
        inputs: Number of inputs.
        bias: Whether there is a bias.
        row_order: [sum(outputs)] int64, the checkpoint's row of each output; None: unchanged.
        is_summed: Sum over the ranks that share the inputs; otherwise the output is a rank's part.
    """

    role: Role
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool
    row_order: Tensor | None = None
    is_summed: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each of the checkpoint's tensors."""
        return self.outputs if len(self.names) == len(self.outputs) else (sum(self.outputs),)

    @property
    def split(self) -> Split:
        return SPLITS[self.role]


class Linear(Protocol):
    @property
    def scaling(self) -> Scaling: ...

    def __call__(self, x: Input) -> Tensor:
        """Return [T, outputs] for x [T, inputs], which is plain or quantized by `self.scaling`."""

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Input:
        """Return gate and up, the halves of the outputs, combined as `gate` states: [T, outputs / 2].

        The result may be quantized by `scaling`, that of the next layer.
        """


class Head(Protocol):
    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return logits [N, V] float32 for x [N, H], written to `logits` if given."""


class Experts(Protocol):
    """The routed experts of a layer, with their router.

    Attributes:
        has_shared: They include the shared expert of ExpertsLoad.
    """

    has_shared: bool

    @property
    def scaling(self) -> Scaling: ...

    def __call__(self, x: Input) -> Tensor:
        """Return [T, H] for x [T, H]: the weighted sum of each token's experts, or this rank's part of it.

        x is plain, or quantized by `self.scaling` with its plain rows, which the router reads.
        """


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """The weights of a router.

    Attributes:
        weight: [E, H].
        bias: [E], added to the logits, or None.
        correction_bias: [E], added to the scores for the choice, or None.
    """

    weight: Tensor
    bias: Tensor | None
    correction_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """A shared expert of the same sizes as the others.

    Attributes:
        linears: Its first layer and down.
        gate: [H], the weight of the gate of its output, or None.
    """

    linears: tuple[LinearSpec, LinearSpec]
    gate: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ExpertsLoad:
    """What the experts of a layer are loaded from.

    Attributes:
        spec: The experts; with several ranks, this rank's own.
        router: The weights of the router, which is never quantized.
        names: Names relative to `prefix`.
        prefix: Prefix of the layer's names.
        hidden: H.
        has_down_bias: This rank adds the bias of down.
        shared: The shared expert, which a method may compute as one of the others; None: there is no such one.
    """

    spec: ExpertsSpec
    router: RouterWeights
    names: ExpertNames
    prefix: str
    hidden: int
    has_down_bias: bool
    shared: SharedExpert | None = None

    @property
    def all_linears(self) -> list[tuple[LinearSpec, LinearSpec]]:
        """Return the layers of the experts, and of the shared one."""
        of_shared = [] if self.shared is None else [self.shared.linears]
        return [self.linears(expert) for expert in self.spec.experts] + of_shared

    def in_one_format(self, scheme_of: Callable[[str], object]) -> Self:
        """Return the load without the shared expert if the scheme of its weights is not that of the others."""
        if self.shared is None:
            return self
        first = self.linears(self.spec.experts.start)
        schemes = [
            [{scheme_of(name) for name in linear.names} for linear in pair] for pair in (first, self.shared.linears)
        ]
        return self if schemes[0] == schemes[1] else replace(self, shared=None)

    def linears(self, expert: int) -> tuple[LinearSpec, LinearSpec]:
        """Return the first layer (gate and up, or up) and down of one expert, with the names of StackedExperts."""
        spec, suffix = self.spec, f".{expert}" if self.names.is_stacked else ""
        first, down = (
            tuple(self.prefix + name.format(expert=expert) + suffix for name in names)
            for names in (self.names.gate_up, (self.names.down,))
        )
        (role, outputs), hidden = spec.entry, self.hidden
        return (
            LinearSpec(role=role, names=first, outputs=outputs, inputs=hidden, bias=spec.bias),
            LinearSpec(role=Role.DOWN, names=down, outputs=(hidden,), inputs=spec.inner, bias=self.has_down_bias),
        )


class LinearMethod(Protocol):
    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        """Load the experts of a layer.

        Raises:
            ValueError: If a tensor is missing or has another shape.
        """

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        """Load a linear layer.

        Raises:
            ValueError: If a tensor is missing or has another shape.
        """

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        """Make the output head.

        Args:
            weight: [V, H], possibly the embedding itself.
            name: Name of the tensor in the checkpoint.
            source: Is informed of the memory that the head keeps besides `weight`.
        """
