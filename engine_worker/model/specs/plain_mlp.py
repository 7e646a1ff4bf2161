"""An MLP without gates: down(relu(up(x)) ** 2) (https://arxiv.org/abs/2109.08668)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import (
    Part,
    Role,
    TensorSpec,
    linear_tensors,
    own_range,
    parts_by_inputs,
    parts_by_outputs,
)


@dataclass(frozen=True, kw_only=True)
class PlainMlpSpec:
    """The MLP of one layer."""

    intermediate_size: int
    bias: bool = False

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        yield from linear_tensors(Role.UP, (names.up,), (self.intermediate_size,), hidden, bias=self.bias)
        yield from linear_tensors(Role.DOWN, (names.down,), (hidden,), self.intermediate_size, bias=self.bias)

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's columns of the inner layer."""
        return replace(self, intermediate_size=self.intermediate_size // size)

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        inner = self.intermediate_size
        yield from parts_by_outputs((names.up,), (inner,), (own_range(inner, rank, size),))
        yield from parts_by_inputs(names.down, inner, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the inner layer; see PartSpec."""
        return self.intermediate_size % size == 0

    @property
    def sizes(self) -> str:
        return f"{self.intermediate_size} intermediate"
