"""Qwen3, dense: each query and key head is normed before the rotation."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec, with_windows
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.architectures.qwen2 import last_windows_of
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import QkNorm

GGUF = GgufFamily(model_type="qwen3", class_name="Qwen3ForCausalLM")


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    attention = attention_spec({"head_dim": 128, **config}, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.HEAD)
    whole = model_spec(config, generation, LayerSpec(mixer=attention, mlp=mlp_spec(config)))
    return with_windows(whole, last_windows_of(config))
