"""Granite with sinks, a window in three of four layers, and a rotary base per layer; base 0 means no positions."""

from dataclasses import replace

from engine_worker.model.architectures import granite
from engine_worker.model.architectures.config_keys import (
    Config,
    layer_types_of,
    number_of,
    positive_int,
    rope_of,
    windows_of,
)
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.attention import RopeSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {"sliding_window": 128, **config}
    kinds = layer_types_of(config, lambda index: index % 4 > 0)
    whole = granite.decoder(config, generation)
    layers = tuple(
        layer.with_attention(rope=rope, window=window, sinks=True)
        for layer, rope, window in zip(whole.layers, _ropes(config), windows_of(config, kinds), strict=True)
    )
    return replace(whole, layers=layers)


def _ropes(config: Config) -> tuple[RopeSpec, ...]:
    num_layers, usual = positive_int(config, "num_hidden_layers"), rope_of(config)
    bases = config.get("layer_rope_theta") or [usual.theta] * num_layers
    if not isinstance(bases, list) or len(bases) != num_layers:
        raise ValueError(f"config.json: layer_rope_theta must be a list of {num_layers} numbers, not {bases!r:.80}")
    thetas = [number_of({"layer_rope_theta": base}, "layer_rope_theta") for base in bases]
    return tuple(replace(usual, theta=theta) if theta else RopeSpec(dim=0) for theta in thetas)
