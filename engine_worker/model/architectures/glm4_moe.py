"""GLM-4.5 to 4.7: sigmoid scores with a correction bias, a shared expert, and dense first layers.

Half of a head is rotated. The layer after the last one is for multi-token prediction.
"""

import re

from engine_worker.model.architectures.config_keys import (
    Config,
    number_of,
    positive_int,
    refuse_unsupported,
    refuse_windows,
    rope_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.architectures.experts_keys import grouped_router_spec
from engine_worker.model.spec import LayerSpec, ModelSpec, MtpSpec
from engine_worker.model.specs.attention import QkNorm
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import ExpertNames, MtpNames, NamesSpec

NAMES = NamesSpec(
    experts=ExpertNames(
        shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)
DEFAULTS = {"n_shared_experts": 1, "partial_rotary_factor": 0.5}


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {**DEFAULTS, **config}
    refuse_unsupported(config)
    refuse_windows(config)
    attention = attention_spec(
        config,
        rope=rope_of(config),
        qkv_bias=bool(config.get("attention_bias")),
        qk_norm=QkNorm.HEAD if config.get("use_qk_norm") else QkNorm.NONE,
    )
    inner = positive_int(config, "moe_intermediate_size")
    shared = MlpSpec(intermediate_size=inner * positive_int(config, "n_shared_experts"))
    experts = ExpertsSpec(router=grouped_router_spec(config), inner=inner, shared=shared)
    num_dense = number_of(config, "first_k_dense_replace", 1)
    layers = tuple(
        LayerSpec(mixer=attention, mlp=mlp_spec(config) if index < num_dense else experts)
        for index in range(positive_int(config, "num_hidden_layers"))
    )
    has_mtp = number_of(config, "num_nextn_predict_layers", 1) > 0
    names = MtpNames.in_layer(NAMES.layer.format(index=len(layers)))
    mtp = MtpSpec(layer=LayerSpec(mixer=attention, mlp=experts), names=names, layer_names=NAMES) if has_mtp else None
    unused = (f"^{re.escape(names.layer)}",)
    return model_spec(config, generation, layers[0], layers=layers, names=NAMES, mtp=mtp, unused=unused)
