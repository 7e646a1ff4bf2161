"""Llama 2 and 3, SmolLM2, and other models with the type `llama`."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec

GGUF = GgufFamily(model_type="llama", class_name="LlamaForCausalLM", has_adjacent_pairs=True)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_windows(config)
    return decoder(config, generation)


def decoder(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    layer = LayerSpec(
        mixer=attention_spec(config, qkv_bias=bias, out_bias=bias),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias"))),
    )
    return model_spec(config, generation, layer)
