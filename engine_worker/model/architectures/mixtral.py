"""Mixtral: all layers have experts, and the weights of the chosen ones sum to 1."""

from engine_worker.model.architectures.config_keys import (
    FULL,
    SLIDING,
    Config,
    positive_int,
    refuse_unsupported,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, model_spec, with_windows
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec, Scoring
from engine_worker.model.specs.names import ExpertNames, NamesSpec

NAMES = NamesSpec(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        down="block_sparse_moe.experts.{expert}.w2",
    )
)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    router = router_spec(config, scoring=Scoring.SOFTMAX_OF_CHOSEN)
    experts = ExpertsSpec(router=router, inner=positive_int(config, "intermediate_size"))
    layer = LayerSpec(mixer=attention_spec(config), mlp=experts)
    kinds = [SLIDING if config.get("sliding_window") else FULL] * positive_int(config, "num_hidden_layers")
    return with_windows(model_spec(config, generation, layer, names=NAMES), windows_of(config, kinds))
