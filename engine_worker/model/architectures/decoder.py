"""The common decoder: attention and a gated MLP in each layer. Families pass only their differences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_worker.model.architectures.config_keys import (
    Config,
    head_dim_of,
    num_kv_heads_of,
    number_of,
    positive_int,
    rope_of,
    token_ids,
)
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import AttentionSpec
from engine_worker.model.specs.mlp import SILU, GateSpec, MlpSpec


def attention_spec(config: Config, **changes: Any) -> AttentionSpec:
    """Return the attention of config.json's common keys, with the family's `changes`."""
    head_dim = head_dim_of(config)
    usual = {
        "num_heads": positive_int(config, "num_attention_heads"),
        "num_kv_heads": num_kv_heads_of(config),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    if "rope" not in changes:
        usual["rope"] = rope_of(config)
    return AttentionSpec(**{**usual, **changes})


def mlp_spec(config: Config, *, bias: bool = False, gate: GateSpec = SILU) -> MlpSpec:
    """Return the gated MLP of config.json's common keys."""
    return MlpSpec(intermediate_size=positive_int(config, "intermediate_size"), bias=bias, gate=gate)


def with_windows(spec: ModelSpec, windows: Sequence[int]) -> ModelSpec:
    """Return `spec` with one window per layer; 0: none."""
    layers = tuple(layer.with_attention(window=window) for layer, window in zip(spec.layers, windows, strict=True))
    return replace(spec, layers=layers)


def model_spec(config: Config, generation: Config, layer: LayerSpec, **changes: Any) -> ModelSpec:
    """Return a network in which all layers are `layer`, unless `changes` has other layers."""
    usual = {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": positive_int(config, "hidden_size"),
        "layers": (layer,) * positive_int(config, "num_hidden_layers"),
        "norm_eps": number_of(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": positive_int(config, "max_position_embeddings"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        "eos_token_ids": token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
    }
    return ModelSpec(**{**usual, **changes})
