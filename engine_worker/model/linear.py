"""Matrix products of a network, whatever their weights are stored as and multiplied by.

    method.load(LinearSpec, source) -> Linear        from a checkpoint; a LinearMethod is a way of storing weights
    Linear(x), Linear.gated(x, activation, scaling)  the product, and the product of a gated MLP's first half
    Linear.scaling                                   how it quantizes its inputs: who makes them may do it for it
    method.head(weight, name, source) -> Head        the product whose outputs are logits

A layer says what it multiplies and where that lies in a checkpoint. How weights are fused, packed, scaled or tiled the
method knows alone (quantization/): nobody else looks at a weight. Loaded at a start; multiplied in every step, on a
block's walk beside the attention of each layer (network.py). It knows no family, no sequence and no rank.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from engine_worker.model.spec import Activation
from engine_worker.model.weights import WeightSource
from kernels.scaled import Scaled

NOTHING_QUANTIZED = "who quantizes nothing is given nothing quantized"
Input = Tensor | Scaled  # of a product: as it is, or quantized as the product would


class Role(StrEnum):
    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"


class Split(StrEnum):
    """Which dimension of a weight the ranks of a group would share out."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"  # the product is a sum over ranks


class Scaling(StrEnum):
    """A product that quantizes its inputs has a scale for each row of them, or for each group of a row."""

    NONE = "none"  # inputs stay as they are
    ROWS = "rows"
    GROUPS = "groups"  # 128 elements of a row


SPLITS = {Role.QKV: Split.OUTPUTS, Role.OUT: Split.INPUTS, Role.GATE_UP: Split.OUTPUTS, Role.DOWN: Split.INPUTS}


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One product of a layer: x [T, inputs] -> [T, sum(outputs)]."""

    role: Role
    names: tuple[
        str, ...
    ]  # of the checkpoint's tensors without `.weight`: one with all rows, or one for each of outputs
    outputs: tuple[int, ...]
    inputs: int
    bias: bool
    row_order: Tensor | None = None  # [sum(outputs)] int64: which row of the checkpoint's tensors each output is
    is_summed: bool = True  # over the ranks that share its inputs; else its outputs are a rank's part

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows the checkpoint's tensors have, name by name."""
        return self.outputs if len(self.names) == len(self.outputs) else (sum(self.outputs),)

    @property
    def split(self) -> Split:
        return SPLITS[self.role]


class Linear(Protocol):
    @property
    def scaling(self) -> Scaling: ...

    def __call__(self, x: Input) -> Tensor:
        """x [T, inputs] -> [T, outputs] in the dtype of activations; it is quantized only by `self.scaling`."""

    def gated(self, x: Input, activation: Activation, scaling: Scaling = Scaling.NONE) -> Input:
        """x [T, inputs] -> activation(gate) * up [T, outputs / 2]: gate and up are halves of the outputs.

        The result may be quantized by `scaling`, that of the product that takes it.
        """


class Head(Protocol):
    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """x [N, H] -> [N, V] float32, written to `logits` if that is given."""


class LinearMethod(Protocol):
    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        """Raises ValueError with the name of a tensor that is missing or of another shape."""

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        """`weight` [V, H], perhaps the embedding's own; `name`: of its tensor in the checkpoint.

        `source` is told what the head keeps beside `weight`.
        """
