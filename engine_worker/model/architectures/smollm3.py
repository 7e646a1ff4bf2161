"""SmolLM3: every fourth layer has no positions (NoPE); windows if `use_sliding_window`."""

from dataclasses import replace

from engine_worker.model.architectures.config_keys import (
    Config,
    layer_types_of,
    refuse_unsupported,
    rope_of,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec, with_windows
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import RopeSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    rope = rope_of(config, default_theta=2_000_000.0)
    rotated = LayerSpec(
        mixer=attention_spec(config, rope=rope, qkv_bias=bias, out_bias=bias),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias"))),
    )
    unrotated = rotated.with_attention(rope=RopeSpec(dim=0))
    whole = model_spec({"tie_word_embeddings": True, **config}, generation, rotated)
    interval = config.get("no_rope_layer_interval", 4)
    is_rotated = config.get("no_rope_layers") or [(index + 1) % interval for index in range(whole.num_layers)]
    if len(is_rotated) != whole.num_layers:
        raise ValueError(f"config.json: no_rope_layers has {len(is_rotated)} entries for {whole.num_layers} layers")
    whole = replace(whole, layers=tuple(rotated if rotates else unrotated for rotates in is_rotated))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = layer_types_of(config, lambda index: window is not None and not is_rotated[index])
    return with_windows(whole, windows_of({**config, "sliding_window": window}, kinds))
