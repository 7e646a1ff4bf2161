"""The attention of one layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.part import (
    Part,
    Range,
    Role,
    TensorSpec,
    linear_tensors,
    own_range,
    parts_by_inputs,
    parts_by_outputs,
)


class QkNorm(StrEnum):
    """RMSNorm of queries and keys before the rotation."""

    NONE = "none"
    HEAD = "head"  # each head separately, one weight [head_dim] for all
    WHOLE = "whole"  # all heads of a token together, weight [num_heads * head_dim]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled; rotary.py computes them. The fields used depend on `kind`.

    linear         factor
    by_wavelength  factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    yarn           factor, beta_fast, beta_slow, original_max_position_embeddings, truncate, attention_factor
    longrope       factors (one per frequency), attention_factor
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # factor of cosines and sines


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """Factor of rotated queries: 1 + beta * ln(1 + floor(position / original_max_position_embeddings))."""

    beta: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotary embedding of the first `dim` elements of a head; the others are not rotated.

    Pairs are (i, i + dim / 2), or (2i, 2i + 1) if `interleaved`. `dim` 0: no positions (NoPE).
    """

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    interleaved: bool = False
    query_scale: QueryScale | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the scores, usually head_dim ** -0.5
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int = 0  # tokens visible to a token, including itself; 0: all before it
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: unchanged
    output_gate: bool = False  # each query head is followed by a gate, whose sigmoid multiplies the head's output
    sinks: bool = False  # each query head has a learned logit that enters the softmax without a value

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The size of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The rows of queries with their gates, of keys, and of values."""
        return self.query_size * (1 + self.output_gate), self.kv_size, self.kv_size

    def num_cache_layers(self, values_per_token: int) -> int:
        """Return 1: its keys and values are one layer of the KV pool."""
        return 1

    def tensors(self, names: NamesSpec, hidden: int) -> Iterator[TensorSpec]:
        """Yield the tensors; see PartSpec."""
        yield from linear_tensors(Role.QKV, names.qkv, self.qkv_sizes, hidden, bias=self.qkv_bias)
        if self.qk_norm is not QkNorm.NONE:
            is_whole = self.qk_norm is QkNorm.WHOLE
            yield TensorSpec(f"{names.query_norm}.weight", (self.query_size if is_whole else self.head_dim,))
            yield TensorSpec(f"{names.key_norm}.weight", (self.kv_size if is_whole else self.head_dim,))
        if self.sinks:
            yield TensorSpec(names.sinks, (self.num_heads,))
        yield from linear_tensors(Role.OUT, (names.out,), (hidden,), self.query_size, bias=self.out_bias)

    def share(self, rank: int, size: int) -> Self:
        """Return the rank's heads; with fewer KV heads than ranks, several ranks have the same one."""
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=max(1, self.num_kv_heads // size))

    def parts(self, names: NamesSpec, hidden: int, rank: int, size: int) -> Iterator[tuple[str, Part]]:
        """Yield the rank's parts; see PartSpec."""
        queries, keys = own_range(self.qkv_sizes[0], rank, size), self._kv_range(rank, size)
        yield from parts_by_outputs(names.qkv, self.qkv_sizes, (queries, keys, keys))
        if self.qk_norm is QkNorm.WHOLE:
            yield f"{names.query_norm}.weight", Part(0, (own_range(self.query_size, rank, size),))
            yield f"{names.key_norm}.weight", Part(0, (keys,))
        if self.sinks:
            yield names.sinks, Part(0, (own_range(self.num_heads, rank, size),))
        yield from parts_by_inputs(names.out, self.query_size, rank, size)

    def fits(self, size: int) -> bool:
        """Return whether `size` divides the heads; see PartSpec."""
        kv_fits = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return self.num_heads % size == 0 and kv_fits

    @property
    def sizes(self) -> str:
        return f"{self.num_heads} heads, {self.num_kv_heads} kv heads"

    def _kv_range(self, rank: int, size: int) -> Range:
        """Return the rows of the key (or value) heads that the rank's queries attend to."""
        first = rank * self.num_kv_heads // size
        num_heads = max(1, self.num_kv_heads // size)
        return first * self.head_dim, (first + num_heads) * self.head_dim
