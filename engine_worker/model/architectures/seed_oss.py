"""Seed-OSS: biases on queries, keys and values, and on the attention output if config.json says so."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    layer = LayerSpec(
        mixer=attention_spec(
            {"head_dim": 128, **config},
            qkv_bias=bool(config.get("attention_bias", True)),
            out_bias=bool(config.get("attention_out_bias", False)),
        ),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias"))),
    )
    return model_spec(config, generation, layer)
