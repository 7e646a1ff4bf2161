"""A Gated DeltaNet layer (https://arxiv.org/abs/2412.06464).

    q, k, v = silu(conv(x)), g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b)
    S = exp(g) * S + beta * k (v - exp(g) * S^T k)^T        per value head, in float32, with q and k of length 1
    output = out_proj(norm(S^T q) * silu(z))

Its state after a token is S of each value head and the last inputs of the convolution.
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
class GatedDeltaSpec:
    """The gated delta rule of one layer.

    Attributes:
        num_key_heads: Heads of queries and keys; each serves num_heads / num_key_heads consecutive value heads.
        num_heads: Heads of values, each with a state.
        key_dim: Elements of a query or key head.
        value_dim: Elements of a value head.
        width: Inputs of a filter of the convolution: the token and those before it.
        interleaved: The checkpoint has q, k, v, z and b, a by key head, in two fused tensors.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    interleaved: bool = False

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def outputs(self) -> tuple[int, ...]:
        """The outputs of the first linear layers: q, k and v; z; b; a."""
        return self.channels, self.value_size, self.num_heads, self.num_heads

    @property
    def state_values(self) -> int:
        """Elements of the state of one sequence: [num_heads, key_dim, value_dim], then [width - 1, channels]."""
        return self.num_heads * self.key_dim * self.value_dim + (self.width - 1) * self.channels

    @property
    def draft_values(self) -> int:
        """Elements kept of a token of a step with drafts: inputs and outputs of the convolution, and the gates."""
        return 2 * self.channels + 2 * self.num_heads

    def num_cache_layers(self, values_per_token: int) -> int:
        """Return 0: it keeps nothing per token."""
        return 0

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        delta = names.delta
        yield TensorSpec(f"{delta.conv}.weight", (self.channels, 1, self.width))
        yield TensorSpec(delta.decay, (self.num_heads,))
        yield TensorSpec(delta.step_bias, (self.num_heads,))
        yield TensorSpec(f"{delta.norm}.weight", (self.value_dim,))
        qkv, z, beta, step = self.outputs
        enter = (qkv + z, beta + step) if self.interleaved else (qkv, z, beta, step)
        yield from linear_tensors(Role.QKV, delta.enter, enter, hidden, bias=False)
        yield from linear_tensors(Role.OUT, (delta.out,), (hidden,), self.value_size, bias=False)

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's key heads with their value heads."""
        return replace(self, num_key_heads=self.num_key_heads // size, num_heads=self.num_heads // size)

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        delta = names.delta
        heads, values = (Part(0, (own_range(total, rank, size),)) for total in (self.num_heads, self.value_size))
        keys, sizes = own_range(self.key_size, rank, size), (self.key_size, self.key_size, self.value_size)
        ((_, convolved), _) = parts_by_outputs((delta.conv,), sizes, (keys, keys, values.ranges[0]))
        if self.interleaved:
            qkv, z, beta, step = self.outputs
            enter = [Part(0, (own_range(total, rank, size),)) for total in (qkv + z, beta + step)]
        else:
            enter = [convolved, values, heads, heads]
        yield from ((f"{name}.weight", part) for name, part in zip(delta.enter, enter, strict=True))
        yield f"{delta.conv}.weight", convolved
        yield delta.decay, heads
        yield delta.step_bias, heads
        yield from parts_by_inputs(delta.out, self.value_size, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the key heads; see PartSpec."""
        return self.num_key_heads % size == 0

    @property
    def sizes(self) -> str:
        return f"{self.num_key_heads} key heads"
