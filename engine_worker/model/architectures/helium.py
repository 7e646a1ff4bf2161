"""Helium: Llama with adjacent rotary pairs."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows, rope_of
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    rope = rope_of(config, interleaved=True, default_theta=100_000.0)
    layer = LayerSpec(
        mixer=attention_spec(config, rope=rope, qkv_bias=bool(config.get("attention_bias"))),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias"))),
    )
    return model_spec(config, generation, layer)
