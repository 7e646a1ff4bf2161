"""Ernie 4.5, dense: rotary pairs are adjacent elements, and one flag enables all biases."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows, rope_of
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    bias = bool(config.get("use_bias"))
    rope = rope_of({"head_dim": 128, **config}, interleaved=True, default_theta=500_000.0)
    layer = LayerSpec(
        mixer=attention_spec({"head_dim": 128, **config}, rope=rope, qkv_bias=bias, out_bias=bias),
        mlp=mlp_spec(config, bias=bias),
    )
    return model_spec({"tie_word_embeddings": True, **config}, generation, layer)
