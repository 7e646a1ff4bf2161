"""Qwen2 and 2.5, Coder and Math: queries, keys and values have a bias."""

from engine_worker.model.architectures.config_keys import (
    Config,
    layer_types_of,
    number_of,
    refuse_unsupported,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec, with_windows
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec

GGUF = GgufFamily(model_type="qwen2", class_name="Qwen2ForCausalLM")


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    layer = LayerSpec(mixer=attention_spec(config, qkv_bias=True), mlp=mlp_spec(config))
    return with_windows(model_spec(config, generation, layer), last_windows_of(config))


def last_windows_of(config: Config) -> tuple[int, ...]:
    """Return the windows: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    is_used = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    first = number_of(config, "max_window_layers", 28)
    kinds = layer_types_of(config, lambda index: is_used and index >= first)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return windows_of({**config, "sliding_window": window}, kinds)
