"""Granite 3 with experts: one tensor has gate and up of all experts, another has down."""

from dataclasses import replace

from engine_worker.model.architectures import granite
from engine_worker.model.architectures.config_keys import Config, positive_int, refuse_windows
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.spec import ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec, Scoring
from engine_worker.model.specs.names import ExpertNames, NamesSpec

NAMES = NamesSpec(
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        gate_up=("block_sparse_moe.input_linear.weight",),
        down="block_sparse_moe.output_linear.weight",
    )
)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_windows(config)
    router = router_spec(config, scoring=Scoring.SOFTMAX_OF_CHOSEN)
    experts = ExpertsSpec(router=router, inner=positive_int(config, "intermediate_size"))
    dense = granite.decoder(config, generation)
    layers = tuple(replace(layer, mlp=experts) for layer in dense.layers)
    return replace(dense, layers=layers, names=NAMES)
