"""A Mamba-2 layer (https://arxiv.org/abs/2405.21060).

    x, B, C = silu(conv(x, B, C)), step = softplus(dt + dt_bias)
    S = exp(-exp(A_log) * step) * S + B (step * x)^T        per head, in float32
    output = out_proj(norm((S^T C + D * x) * silu(z)))

Its state after a token is S of each head and the last inputs of the convolution.
"""

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
class StateSpaceSpec:
    """The state space of one layer.

    Attributes:
        num_groups: Groups of consecutive heads with the same B and C; each group is normed alone.
        num_heads: Heads of x, each with a state.
        state_dim: Elements of B and C of a group.
        head_dim: Elements of x of a head.
        width: Inputs of a filter of the convolution: the token and those before it.
        conv_bias: The filters have biases.
        bias: Both linear layers have biases.
    """

    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    width: int
    conv_bias: bool = False
    bias: bool = False

    @property
    def group_size(self) -> int:
        """Elements of B of all groups, and of C."""
        return self.num_groups * self.state_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The channels of the convolution: x, B and C."""
        return self.value_size, self.group_size, self.group_size

    @property
    def outputs(self) -> tuple[int, ...]:
        """The outputs of the first linear layer: z; x, B and C; dt."""
        return self.value_size, *self.convolved, self.num_heads

    @property
    def state_values(self) -> int:
        """Elements of the state of one sequence: [num_heads, state_dim, head_dim], then [width - 1, channels]."""
        return self.value_size * self.state_dim + (self.width - 1) * sum(self.convolved)

    @property
    def draft_values(self) -> int:
        """Elements kept of a token of a step with drafts: inputs and outputs of the convolution, and the step."""
        return 2 * sum(self.convolved) + self.num_heads

    def num_cache_layers(self, values_per_token: int) -> int:
        """Return 0: it keeps nothing per token."""
        return 0

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        space, channels = names.space, sum(self.convolved)
        yield TensorSpec(f"{space.conv}.weight", (channels, 1, self.width))
        if self.conv_bias:
            yield TensorSpec(f"{space.conv}.bias", (channels,))
        for name in (space.decay, space.skip, space.step_bias):
            yield TensorSpec(name, (self.num_heads,))
        yield TensorSpec(f"{space.norm}.weight", (self.value_size,))
        yield from linear_tensors(Role.QKV, (space.enter,), self.outputs, hidden, bias=self.bias)
        yield from linear_tensors(Role.OUT, (space.out,), (hidden,), self.value_size, bias=self.bias)

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's groups with their heads."""
        return replace(self, num_groups=self.num_groups // size, num_heads=self.num_heads // size)

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        space = names.space
        heads, values, groups = (
            own_range(total, rank, size) for total in (self.num_heads, self.value_size, self.group_size)
        )
        yield from parts_by_outputs((space.enter,), self.outputs, (values, values, groups, groups, heads))
        yield from parts_by_outputs((space.conv,), self.convolved, (values, groups, groups))
        yield from ((name, Part(0, (heads,))) for name in (space.decay, space.skip, space.step_bias))
        yield f"{space.norm}.weight", Part(0, (values,))
        yield from parts_by_inputs(space.out, self.value_size, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the groups, because the heads of a group are normed together."""
        return self.num_groups % size == 0

    @property
    def sizes(self) -> str:
        return f"{self.num_groups} groups of state space heads"
