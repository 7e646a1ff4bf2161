"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary frequencies are never scaled."""

from dataclasses import replace

from engine_worker.model.architectures import olmo2
from engine_worker.model.architectures.config_keys import FULL, SLIDING, Config, layer_types_of, rope_of, windows_of
from engine_worker.model.spec import ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {"sliding_window": 4096, "rope_theta": 500_000.0, **config}
    kinds = layer_types_of(config, lambda index: (index + 1) % 4 > 0)
    stated = config.get("rope_parameters") or {}
    ropes = {
        FULL: rope_of({**config, "rope_parameters": stated.get(FULL)}),
        SLIDING: rope_of({**config, "rope_scaling": None, "rope_parameters": stated.get(SLIDING)}),
    }
    whole = olmo2.decoder(config, generation)
    layers = tuple(
        layer.with_attention(rope=ropes[kind], window=window)
        for layer, kind, window in zip(whole.layers, kinds, windows_of(config, kinds), strict=True)
    )
    return replace(whole, layers=layers)
