"""The parts of a decoder-only network as frozen values, made by a family's file and used to build or size a network.

    ModelSpec -> one LayerSpec per layer -> AttentionSpec, GatedMlpSpec

A feature that a network lacks is a neutral value (no norm, a factor of 1), never a branch over families. NamesSpec has
the names of the checkpoint's tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engine_worker.kv.layout import KVGroup, KVLayout
from engine_worker.model.weight_format import DENSE, WeightFormat


class QkNorm(StrEnum):
    """RMSNorm of queries and keys before the rotation."""

    NONE = "none"
    HEAD = "head"  # each head separately, one weight [head_dim] for all
    WHOLE = "whole"  # all heads of a token together, weight [num_heads * head_dim]


class Activation(StrEnum):
    """The activation of a gated MLP's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # torch's gelu(x, approximate="tanh")


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
    """Factor of rotated queries: 1 + beta * ln(1 + floor(position / original_max_position_embeddings)), as Llama 4."""

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
    sinks: bool = False  # each query head has a learned logit that enters the softmax without a value

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The size of a token's keys, or of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class GatedMlpSpec:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer, with norms before a part (on its input), after it (on what it adds), or both."""

    attention: AttentionSpec
    mlp: GatedMlpSpec
    norms_before: bool = True
    norms_after: bool = False
    residual_scale: float = 1.0  # factor of what a part adds


@dataclass(frozen=True, kw_only=True)
class NamesSpec:
    """The names of a checkpoint's tensors; several names of one layer are concatenated in this order."""

    layer: str = "model.layers.{index}."
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


class ModelShape(Protocol):
    """What is known of any network before its weights are loaded."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer."""

    def num_parameters(self) -> int: ...


def kv_layout(shape: ModelShape, block_size: int, dtype: str) -> KVLayout:
    """Return the KV layout: one group of all layers, with the widest window; `dtype` is a key of ITEMSIZES."""
    windows = {attention.window for attention in shape.attentions}
    group = KVGroup(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        window=0 if 0 in windows else max(windows, default=0),
    )
    return KVLayout(groups=(group,), block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only network."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float = 0.0  # added to all norm weights, which some checkpoints store around 0
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # dtype of the checkpoint: bfloat16, float16 or float32
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # round the factor to the model's dtype
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: unchanged
    quantization: WeightFormat = DENSE
    names: NamesSpec = field(default_factory=NamesSpec)
    head_rows: tuple[int, int] | None = None  # [start, end) of the tokens whose logits a rank computes

    # All layers have the same KV shape.
    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.attention for layer in self.layers)

    def num_parameters(self) -> int:
        first, end = self.head_rows or (0, self.vocab_size)
        embeddings = self.hidden_size * (self.vocab_size + (0 if self.tie_word_embeddings else end - first))
        return embeddings + self.hidden_size + sum(self._layer_parameters(layer) for layer in self.layers)

    def _layer_parameters(self, layer: LayerSpec) -> int:
        attention, mlp, hidden = layer.attention, layer.mlp, self.hidden_size
        query, kv, inner = attention.query_size, attention.kv_size, mlp.intermediate_size
        norms = 2 * hidden * (layer.norms_before + layer.norms_after)
        norms += _qk_norm_parameters(attention) + attention.sinks * attention.num_heads
        biases = attention.qkv_bias * (query + 2 * kv) + attention.out_bias * hidden + mlp.bias * (2 * inner + hidden)
        return hidden * (2 * query + 2 * kv) + 3 * hidden * inner + norms + biases


def _qk_norm_parameters(attention: AttentionSpec) -> int:
    sizes: Mapping[QkNorm, int] = {
        QkNorm.NONE: 0,
        QkNorm.HEAD: 2 * attention.head_dim,
        QkNorm.WHOLE: attention.query_size + attention.kv_size,
    }
    return sizes[attention.qk_norm]
