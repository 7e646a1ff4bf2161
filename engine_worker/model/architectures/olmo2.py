"""OLMo 2: norms follow attention and MLP, and queries and keys are normed over all their heads."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import QkNorm
from engine_worker.model.specs.names import NamesSpec

NAMES = NamesSpec(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_windows(config)
    return decoder(config, generation)


def decoder(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    layer = LayerSpec(
        mixer=attention_spec(config, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.WHOLE),
        mlp=mlp_spec(config),
        norms_before=False,
        norms_after=True,
    )
    return model_spec(config, generation, layer, names=NAMES)
