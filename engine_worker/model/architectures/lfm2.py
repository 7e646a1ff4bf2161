"""LFM2 and 2.5: gated short convolutions in most layers, attention with normed heads in the others."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.architectures.config_keys import (
    FULL,
    Config,
    mixers_by_type,
    number_of,
    positive_int,
    refuse_unsupported,
    rope_of,
)
from engine_worker.model.architectures.decoder import attention_spec, model_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import AttentionSpec, QkNorm
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import NamesSpec
from engine_worker.model.specs.short_conv import ShortConvSpec

CONV = "conv"  # config.json's name of the layer type
NAMES = NamesSpec(
    norm="model.embedding_norm.weight",
    out="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    before_attention="operator_norm",
    before_mlp="ffn_norm",
)
_DEFAULTS: dict[str, Any] = {"block_multiple_of": 256, "conv_L_cache": 3}


def _from_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a file has per layer, and the norms' epsilon under LFM2's name."""
    heads = config["num_key_value_heads"]
    types = [FULL if count else CONV for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": types, "norm_eps": config["rms_norm_eps"]}


GGUF = GgufFamily(
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    config={"block_auto_adjust_ff_dim": False},  # the file has the exact size
    keys={"conv_L_cache": "shortconv.l_cache"},
    has_kv_heads_by_layer=True,
    derived=_from_gguf,
)


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    refuse_unsupported(config)
    mlp = MlpSpec(intermediate_size=_inner_size(config))
    layers = tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer in mixers(config))
    return model_spec(config, generation, layers[0], layers=layers, **common(config))


def common(config: Config) -> dict[str, Any]:
    """Return the values of a ModelSpec that have other keys than in most families."""
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    return {"norm_eps": number_of(config, "norm_eps", 1e-5), "tie_word_embeddings": bool(tied), "names": NAMES}


def mixers(config: Config) -> list[AttentionSpec | ShortConvSpec]:
    """Return the mixer of each layer.

    Raises:
        ValueError: If layer_types is invalid or has no attention, whose KV heads set the size of a block.
    """
    attention = attention_spec(config, rope=rope_of(config, default_theta=1_000_000.0), qk_norm=QkNorm.HEAD)
    conv = ShortConvSpec(
        channels=positive_int(config, "hidden_size"),
        width=positive_int(config, "conv_L_cache"),
        bias=bool(config.get("conv_bias")),
    )
    kinds: dict[str, AttentionSpec | ShortConvSpec] = {FULL: attention, CONV: conv}
    return mixers_by_type(config, _layer_types(config), kinds)


def _layer_types(config: Config) -> list[str]:
    """Return layer_types; older files have full_attn_idxs, and without either all layers attend."""
    if config.get("layer_types") is not None:
        return list(config["layer_types"])
    indices = range(positive_int(config, "num_hidden_layers"))
    attending = config.get("full_attn_idxs")
    return [FULL if attending is None or index in attending else CONV for index in indices]


def _inner_size(config: Config) -> int:
    """Return the MLP's inner size: two thirds of config.json's, scaled and rounded up, unless it is exact."""
    size = positive_int(config, "block_ff_dim" if "block_ff_dim" in config else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), positive_int(config, "block_multiple_of")
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
