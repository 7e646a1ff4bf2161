"""What every spec of a mixer or an MLP provides: its tensors, and the part of each that a rank has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from engine_worker.model.specs.names import NamesSpec

Shape = tuple[int, ...]
Range = tuple[int, int]  # [start, end)


class Role(StrEnum):
    """Which linear layer of a network a weight belongs to."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    UP = "up"  # of an MLP without gates
    DOWN = "down"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        product: None for an embedding, a norm, a bias, or a router.
        of_experts: It is a weight of the experts among which a router chooses.
    """

    name: str
    shape: Shape
    product: Role | None = None
    of_experts: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows (dimension 0) or columns (dimension 1) of a tensor: its `ranges`, concatenated."""

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: Shape) -> Shape:
        size = sum(end - start for start, end in self.ranges)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])


NOTHING = Part(0, ())


class PartSpec(Protocol):
    """A mixer or an MLP of a layer. Names of tensors are relative to the layer's prefix."""

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors in the checkpoint's order."""

    def share(self, rank: int, size: int) -> Self:
        """Return the part's spec on one of `size` ranks."""

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's part of each tensor; tensors that are not listed are replicated."""

    def fits(self, size: int) -> bool:
        """Return whether `size` ranks can share the part."""

    @property
    def sizes(self) -> str:
        """The numbers that ranks divide, for messages."""


def linear_tensors(
    product: Role, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool, of_experts: bool = False
) -> Iterator[TensorSpec]:
    """Yield the tensors of linear layers that are separate, or fused into one tensor."""
    rows = outputs if len(names) == len(outputs) else (sum(outputs),)
    for name, size in zip(names, rows, strict=True):
        yield TensorSpec(f"{name}.weight", (size, inputs), product, of_experts)
        if bias:
            yield TensorSpec(f"{name}.bias", (size,))


def parts_by_outputs(names: Sequence[str], outputs: Sequence[int], mine: Sequence[Range]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of linear layers that are separate, or fused into one tensor."""
    if len(names) == len(outputs):
        parts = [Part(0, (rows,)) for rows in mine]
    else:
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        parts = [Part(0, tuple((at + first, at + end) for at, (first, end) in zip(starts, mine, strict=True)))]
    for name, part in zip(names, parts, strict=True):
        yield f"{name}.weight", part
        yield f"{name}.bias", part


def parts_by_inputs(name: str, inputs: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
    """Yield the part of a linear layer whose outputs are summed over the ranks; rank 0 adds the bias."""
    yield f"{name}.weight", Part(1, (own_range(inputs, rank, size),))
    if rank > 0:
        yield f"{name}.bias", NOTHING


def own_range(length: int, rank: int, size: int) -> Range:
    """Return the rank's range of `length` elements."""
    return rank * length // size, (rank + 1) * length // size
