"""Mistral and Ministral: Llama's network; 7B v0.1 has a window in all layers, Ministral 8B in those listed."""

from engine_worker.model.architectures import llama
from engine_worker.model.architectures.config_keys import Config, layer_types_of, windows_of
from engine_worker.model.architectures.decoder import with_windows
from engine_worker.model.spec import ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    """Make the spec. A missing `sliding_window` means the class default, 4,096 tokens; null means none."""
    config = {"sliding_window": 4096, **config}
    kinds = layer_types_of(config, lambda index: config["sliding_window"] is not None)
    if config["model_type"] == "mistral" and len(set(kinds)) > 1:
        raise ValueError("config.json: model_type 'mistral' has one layer type; use model_type 'ministral' for several")
    whole = llama.decoder(config, generation)
    return with_windows(whole, windows_of(config, kinds))
