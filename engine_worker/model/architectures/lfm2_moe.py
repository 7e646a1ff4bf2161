"""LFM2 with experts: sigmoid scores, a bias that affects the choice only, and dense first layers."""

from dataclasses import replace

from engine_worker.model.architectures import lfm2
from engine_worker.model.architectures.config_keys import Config, number_of, positive_int, refuse_unsupported
from engine_worker.model.architectures.decoder import mlp_spec, model_spec
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec, Scoring
from engine_worker.model.specs.names import ExpertNames

NAMES = replace(
    lfm2.NAMES,
    experts=ExpertNames(
        router="feed_forward.gate",
        correction_bias="feed_forward.expert_bias",
        gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
        down="feed_forward.experts.{expert}.w2",
    ),
)


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {"conv_L_cache": 3, **config}
    refuse_unsupported(config)
    router = router_spec(
        config,
        scoring=Scoring.SIGMOID,
        renormalize=bool(config.get("norm_topk_prob", True)),  # the library adds 1e-6 to the sum, which is about 1
        scale=number_of(config, "routed_scaling_factor", 1.0),
        correction_bias=bool(config.get("use_expert_bias", True)),
    )
    experts = ExpertsSpec(router=router, inner=positive_int(config, "moe_intermediate_size"))
    num_dense = number_of(config, "num_dense_layers", 2)
    layers = tuple(
        LayerSpec(mixer=mixer, mlp=mlp_spec(config) if index < num_dense else experts)
        for index, mixer in enumerate(lfm2.mixers(config))
    )
    return model_spec(config, generation, layers[0], layers=layers, **{**lfm2.common(config), "names": NAMES})
