"""Qwen2 and 2.5, Coder and Math: queries, keys and values have a bias."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec

GGUF = GgufFamily(model_type="qwen2", class_name="Qwen2ForCausalLM")


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows({"use_sliding_window": False, **config})
    layer = LayerSpec(attention=attention_spec(config, qkv_bias=True), mlp=mlp_spec(config))
    return model_spec(config, generation, layer)
