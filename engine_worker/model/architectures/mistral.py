"""Mistral 7B from v0.2 on, Mistral Nemo and Small: Llama's layers. The first Mistral 7B has a window: it is refused."""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    return model_spec(config, generation, LayerSpec(attention=attention_spec(config), mlp=mlp_spec(config)))
