"""Granite 3: factors on the embedding, the scores, the residuals and the logits."""

from engine_worker.model.architectures.config_keys import Config, number_of, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_windows(config)
    return decoder(config, generation)


def decoder(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    scale = number_of(config, "attention_multiplier", 1.0)
    layer = LayerSpec(
        mixer=attention_spec(config, scale=scale, qkv_bias=bias, out_bias=bias),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias"))),
        residual_scale=number_of(config, "residual_multiplier", 1.0),
    )
    return model_spec(
        config,
        generation,
        layer,
        embedding_scale=number_of(config, "embedding_multiplier", 1.0),
        logit_scale=1.0 / number_of(config, "logits_scaling", 1.0),
    )
