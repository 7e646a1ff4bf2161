"""Ministral 3: Llama's network with yarn, whose rotated queries grow with the position (Llama 4's scaling)."""

from dataclasses import replace

from engine_worker.model.architectures import llama
from engine_worker.model.architectures.config_keys import Config, number_of, positive_int
from engine_worker.model.architectures.decoder import with_windows
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.attention import QueryScale

# Defaults of transformers' configuration class.
_ROPE = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {"head_dim": 128, **config, "rope_parameters": config.get("rope_parameters") or _ROPE}
    whole = llama.decoder(config, generation)
    scale = _query_scale(config["rope_parameters"])
    layers = tuple(
        layer.with_attention(rope=replace(attention.rope, query_scale=scale))
        for layer, attention in zip(whole.layers, whole.attentions, strict=True)
    )
    window = positive_int(config, "sliding_window") if config.get("sliding_window") else 0
    is_used = window < whole.max_position_embeddings
    return with_windows(replace(whole, layers=layers), (window if is_used else 0,) * len(layers))


def _query_scale(rope: Config) -> QueryScale:
    original = positive_int(rope, "original_max_position_embeddings")
    return QueryScale(beta=number_of(rope, "llama_4_scaling_beta"), original_max_position_embeddings=original)
