"""Gemma 2 and 3: norms around every part, GELU gates, scaled embeddings, and windows in most layers.

Gemma 2 has softcaps on scores and logits, and a window in every other layer. Gemma 3 norms each query and key head
instead; five of six layers have a window and a rotary base of their own.
"""

from engine_worker.model.architectures.config_keys import (
    FULL,
    SLIDING,
    Config,
    layer_types_of,
    number_of,
    positive_int,
    refuse_unsupported,
    rope_of,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import QkNorm, RopeSpec
from engine_worker.model.specs.mlp import GELU_TANH, GateKind
from engine_worker.model.specs.names import NamesSpec

NAMES = NamesSpec(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

# Defaults of transformers' configuration classes, which published files omit.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS_OF_TYPE = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
    "gemma3_text": {},
}


def _scalar_of_queries(config: Config) -> Config:
    """Return the score scale; the 27B model (62 layers) uses hidden_size / num_heads instead of head_dim."""
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {"query_pre_attn_scalar": scalar}


GGUF = GgufFamily(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    config=dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    derived=_scalar_of_queries,
    norm_offset=1.0,
)


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {**DEFAULTS, **DEFAULTS_OF_TYPE[config["model_type"]], **config}
    refuse_unsupported(config, GateKind.GELU_TANH)
    _refuse(config)
    is_third = config["model_type"] == "gemma3_text"
    pattern = positive_int({"sliding_window_pattern": 6, **config}, "sliding_window_pattern") if is_third else 2
    kinds = layer_types_of(config, lambda index: (index + 1) % pattern > 0)
    ropes = _ropes(config) if is_third else dict.fromkeys((FULL, SLIDING), rope_of(config))
    layers = tuple(
        LayerSpec(
            mixer=attention_spec(
                config,
                rope=ropes[kind],
                window=window,
                scale=positive_int(config, "query_pre_attn_scalar") ** -0.5,
                softcap=0.0 if is_third else number_of(config, "attn_logit_softcapping"),
                qk_norm=QkNorm.HEAD if is_third else QkNorm.NONE,
                qkv_bias=bool(config.get("attention_bias")),
                out_bias=bool(config.get("attention_bias")),
            ),
            mlp=mlp_spec(config, gate=GELU_TANH),
            norms_after=True,
        )
        for kind, window in zip(kinds, windows_of(config, kinds), strict=True)
    )
    return model_spec(
        config,
        generation,
        layers[0],
        layers=layers,
        names=NAMES,
        norm_offset=1.0,
        embedding_scale=positive_int(config, "hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_softcap=number_of(config, "final_logit_softcapping"),
    )


def _refuse(config: Config) -> None:
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is not supported; attention is causal")
    if config["model_type"] == "gemma3_text" and config.get("attn_logit_softcapping"):
        raise ValueError(
            f"config.json: attn_logit_softcapping = {config['attn_logit_softcapping']!r} is not supported in Gemma 3; "
            "set it to null"
        )


def _ropes(config: Config) -> dict[str, RopeSpec]:
    """Return the rotary embedding of each layer type: windowed layers have another base.

    Files have one mapping per type, or in older versions separate keys.
    """
    stated = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta") or 1_000_000.0, **(config.get("rope_scaling") or {})}
    sliding = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0}
    parameters = {FULL: {**full, **(stated.get(FULL) or {})}, SLIDING: {**sliding, **(stated.get(SLIDING) or {})}}
    return {kind: rope_of({**config, "rope_parameters": found}) for kind, found in parameters.items()}
