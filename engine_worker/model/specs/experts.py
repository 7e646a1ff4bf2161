"""A mixture of experts: a router chooses a few MLPs for each token; a shared one may serve all tokens.

Ranks share the inner size of every expert (tensor parallelism), or the experts themselves (expert parallelism).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from engine_worker.model.specs.mlp import SILU, GateSpec, MlpSpec, entry_of
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import (
    NOTHING,
    Part,
    Range,
    Role,
    Shape,
    TensorSpec,
    linear_tensors,
    own_range,
    parts_by_inputs,
    parts_by_outputs,
)

MIN_EXPERT_COLUMNS = 64  # inner columns of a tile


class Scoring(StrEnum):
    """How router logits become weights."""

    SOFTMAX = "softmax"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How the experts of a token are chosen and weighted, in float32. Ties go to the lower expert.

    Attributes:
        num_experts: Experts of the layer.
        top_k: Experts per token.
        scoring: How logits become weights.
        renormalize: Divide the weights by their sum.
        scale: Factor of the weights.
        num_groups: Groups of consecutive experts, of equal size.
        num_chosen_groups: Experts come from the groups with the largest sums of their two best scores.
        bias: The logits have a bias.
        correction_bias: A bias is added to the scores for the choice only, not for the weights.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    bias: bool = False
    correction_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of one layer.

    Attributes:
        router: How they are chosen.
        inner: Inner size of an expert.
        gate: How gate and up are combined; None: without gates, relu(up) ** 2.
        bias: Gate, up and down have biases; only in stacked tensors.
        interleaved: Rows of gate and up alternate in the checkpoint.
        transposed: Stacked tensors are [experts, inputs, outputs].
        shared: An MLP that serves every token.
        shared_gate: Its output is multiplied by the sigmoid of a linear layer with one output.
        owned: The experts of this rank; None: all.
        granule: Inner columns that a rank must not cut: a tile, or a block of scales.
        by_experts: Ranks share experts even if they could share the inner size.
    """

    router: RouterSpec
    inner: int
    gate: GateSpec | None = SILU
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    owned: Range | None = None
    granule: int = MIN_EXPERT_COLUMNS
    by_experts: bool = False

    @property
    def experts(self) -> range:
        """The experts of this rank."""
        return range(*self.owned) if self.owned is not None else range(self.router.num_experts)

    @property
    def entry(self) -> tuple[Role, tuple[int, ...]]:
        """The role and the outputs of an expert's first linear layer."""
        return entry_of(self.gate, self.inner)

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        experts, router = names.experts, self.router
        yield TensorSpec(f"{experts.router}.weight", (router.num_experts, hidden))
        if router.bias:
            yield TensorSpec(f"{experts.router}.bias", (router.num_experts,))
        if router.correction_bias:
            yield TensorSpec(experts.correction_bias, (router.num_experts,))
        yield from self._stacked(names, hidden) if experts.is_stacked else self._separate(names, hidden)
        if self.shared is not None:
            yield from self.shared.tensors(shared_names(names), hidden)
        if self.shared_gate:
            yield TensorSpec(f"{experts.shared_gate}.weight", (1, hidden))

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's inner columns of every expert, or its experts."""
        shared = self.shared and self.shared.share(rank, size)
        if self._splits_experts(size):
            return replace(self, shared=shared, owned=own_range(self.router.num_experts, rank, size))
        return replace(self, shared=shared, inner=self.inner // size)

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        if names.experts.is_stacked:
            yield from self._parts_of_stacked(names, rank, size)
        else:
            yield from self._parts_of_separate(names, rank, size)
        if self.shared is not None:
            yield from self.shared.parts(shared_names(names), hidden, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the inner size or the experts; see PartSpec."""
        count = self.router.num_experts if self._splits_experts(size) else self.inner
        return count % size == 0 and (self.shared is None or self.shared.fits(size))

    @property
    def sizes(self) -> str:
        shared = f", {self.shared.sizes} in the shared expert" if self.shared is not None else ""
        return f"{self.router.num_experts} experts of {self.inner}{shared}"

    def _splits_experts(self, size: int) -> bool:
        cuts = self.inner % self.granule == 0 and self.inner // size % self.granule > 0
        return size > 1 and (self.by_experts or self.inner % size > 0 or cuts)

    def stacked_shape(self, rows: int, columns: int) -> Shape:
        """Return the shape of a stacked tensor of weights [rows, columns]."""
        return (len(self.experts), *((columns, rows) if self.transposed else (rows, columns)))

    def _stacked(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        experts, inner, count = names.experts, self.inner, len(self.experts)
        role, outputs = self.entry
        yield TensorSpec(experts.gate_up[0], self.stacked_shape(sum(outputs), hidden), role, of_experts=True)
        yield TensorSpec(experts.down, self.stacked_shape(hidden, inner), Role.DOWN, of_experts=True)
        if self.bias:
            yield TensorSpec(experts.gate_up_bias, (count, sum(outputs)))
            yield TensorSpec(experts.down_bias, (count, hidden))

    def _separate(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        role, outputs = self.entry
        for expert in self.experts:
            first = [name.format(expert=expert) for name in names.experts.gate_up]
            yield from linear_tensors(role, first, outputs, hidden, bias=False, of_experts=True)
            down = names.experts.down.format(expert=expert)
            yield from linear_tensors(Role.DOWN, (down,), (hidden,), self.inner, bias=False, of_experts=True)

    def _parts_of_separate(self, names: NamesSpec, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        experts, columns = names.experts, own_range(self.inner, rank, size)
        owned = range(*own_range(self.router.num_experts, rank, size)) if self._splits_experts(size) else None
        for expert in self.experts:
            first = [name.format(expert=expert) for name in experts.gate_up]
            down = experts.down.format(expert=expert)
            if owned is None:
                yield from parts_by_outputs(first, self.entry[1], (columns,) * len(first))
                yield from parts_by_inputs(down, self.inner, rank, size)
            elif expert not in owned:
                yield from ((f"{name}.weight", NOTHING) for name in (*first, down))

    def _parts_of_stacked(self, names: NamesSpec, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        experts = names.experts
        if self._splits_experts(size):
            owned = Part(0, (own_range(self.router.num_experts, rank, size),))
            every = (*experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
            yield from ((name, owned) for name in every)
            return
        (first, end), inner = own_range(self.inner, rank, size), self.inner
        if self.interleaved:
            rows: tuple[Range, ...] = ((2 * first, 2 * end),)
        else:
            rows = tuple((start + first, start + end) for start in range(0, sum(self.entry[1]), inner))
        yield experts.gate_up[0], Part(2 if self.transposed else 1, rows)
        yield experts.gate_up_bias, Part(1, rows)
        yield experts.down, Part(1 if self.transposed else 2, ((first, end),))
        if rank > 0:
            yield experts.down_bias, NOTHING


def shared_names(names: NamesSpec) -> NamesSpec:
    """Return the names of the shared expert as those of an MLP."""
    return replace(names, gate_up=names.experts.shared_gate_up, down=names.experts.shared_down)
