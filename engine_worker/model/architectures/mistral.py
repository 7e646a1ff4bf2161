"""Mistral and Ministral: Llama's network; 7B v0.1 has a window in all layers, Ministral 8B in those that it names.

It is used once, at a worker's start: it makes a ModelSpec of config.json, of which network.py is built. It knows no
tensors and no steps.
"""

from engine_worker.model.architectures import llama
from engine_worker.model.architectures.config_keys import Config, layer_types_of, windows_of
from engine_worker.model.architectures.decoder import with_windows
from engine_worker.model.spec import ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    """A config.json without `sliding_window` has the class's own, 4,096 tokens; null is none."""
    config = {"sliding_window": 4096, **config}
    kinds = layer_types_of(config, lambda index: config["sliding_window"] is not None)
    if config["model_type"] == "mistral" and len(set(kinds)) > 1:
        raise ValueError(
            "config.json: layer_types differ, and a 'mistral' has one; model_type 'ministral' is supported"
        )
    whole = llama.decoder(config, generation)
    return with_windows(whole, windows_of(config, kinds))
