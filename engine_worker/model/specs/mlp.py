"""An MLP: down(gate function(gate(x), up(x))), or without a gate, down(relu(up(x)) ** 2) (arXiv:2109.08668)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
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


class GateKind(StrEnum):
    """The activation of a gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # torch's gelu(x, approximate="tanh")


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """How gate and up become one value: activation(gate) * (up + up_offset).

    With `limit`, gate is at most `limit`, and up is between -limit and limit. silu is gate * sigmoid(alpha * gate).
    """

    kind: GateKind = GateKind.SILU
    alpha: float = 1.0
    limit: float = 0.0  # 0: none
    up_offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is activation(gate) * up, which the kernels of dense layers compute."""
        return self.alpha == 1.0 and self.limit == 0.0 and self.up_offset == 0.0


SILU, GELU_TANH = GateSpec(), GateSpec(kind=GateKind.GELU_TANH)


def entry_of(gate: GateSpec | None, inner: int) -> tuple[Role, tuple[int, ...]]:
    """Return the role and the outputs of the first linear layer: gate and up, or up."""
    return (Role.UP, (inner,)) if gate is None else (Role.GATE_UP, (inner, inner))


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """The MLP of one layer.

    Attributes:
        intermediate_size: Inner size.
        bias: The linear layers have biases.
        gate: How gate and up are combined; None: relu(up) ** 2.
    """

    intermediate_size: int
    bias: bool = False
    gate: GateSpec | None = SILU

    @property
    def entry(self) -> tuple[Role, tuple[int, ...]]:
        """The role and the outputs of the first linear layer."""
        return entry_of(self.gate, self.intermediate_size)

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        role, outputs = self.entry
        yield from linear_tensors(role, names.gate_up, outputs, hidden, bias=self.bias)
        yield from linear_tensors(Role.DOWN, (names.down,), (hidden,), self.intermediate_size, bias=self.bias)

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's columns of the inner layer."""
        return replace(self, intermediate_size=self.intermediate_size // size)

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        (_, outputs), inner = self.entry, self.intermediate_size
        yield from parts_by_outputs(names.gate_up, outputs, (own_range(inner, rank, size),) * len(outputs))
        yield from parts_by_inputs(names.down, inner, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the inner layer; see PartSpec."""
        return self.intermediate_size % size == 0

    @property
    def sizes(self) -> str:
        return f"{self.intermediate_size} intermediate"
