"""Nemotron-H, Nemotron Nano 2 and 3: Mamba-2, a few layers of attention without positions, MLPs without gates.

Nemotron 3 has experts, without gates too.
"""

from typing import Any

from engine_worker.model.architectures.config_keys import (
    FULL,
    LINEAR,
    Config,
    mixers_by_type,
    number_of,
    positive_int,
)
from engine_worker.model.architectures.decoder import attention_spec, model_spec
from engine_worker.model.architectures.experts_keys import grouped_router_spec
from engine_worker.model.architectures.mamba_keys import heads_and_groups, refuse_step_limits, transformers_types
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import RopeSpec
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import ExpertNames, NamesSpec, StateSpaceNames
from engine_worker.model.specs.state_space import StateSpaceSpec

_NAMES = NamesSpec(
    layer="backbone.layers.{index}.",
    embedding="backbone.embeddings.weight",
    norm="backbone.norm_f.weight",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    space=StateSpaceNames.under("mixer"),
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    experts=ExpertNames(
        router="mixer.gate",
        correction_bias="mixer.gate.e_score_correction_bias",
        gate_up=("mixer.experts.{expert}.up_proj",),
        down="mixer.experts.{expert}.down_proj",
        shared_gate_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        stacked=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    ),
    before_attention="norm",
    before_mlp="norm",
)
_PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_DEFAULTS: dict[str, Any] = {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True}


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    _refuse_unsupported(config)
    types = _layer_types(config)
    config["num_hidden_layers"] = len(types)
    config.setdefault("head_dim", config.get("attention_head_dim"))
    kinds = {
        FULL: LayerSpec(mixer=attention_spec(config, rope=RopeSpec(dim=0)), mlp=None),
        LINEAR: LayerSpec(mixer=_state_space(config), mlp=None),
        "mlp": LayerSpec(mixer=None, mlp=_mlp(config, "intermediate_size")),
    }
    if "moe" in types:
        kinds["moe"] = LayerSpec(mixer=None, mlp=_experts(config))
    layers = tuple(mixers_by_type(config, types, kinds))
    return model_spec(
        config,
        generation,
        layers[0],
        layers=layers,
        norm_eps=number_of(config, "layer_norm_epsilon", 1e-5),
        names=_NAMES,
        tie_word_embeddings=False,  # transformers ignores config.json's value: files have lm_head.weight
    )


def _layer_types(config: Config) -> list[str]:
    """Return the type of each layer, which older files have as letters."""
    for key in ("layers_block_type", "layer_types"):
        if config.get(key):
            return transformers_types(config[key])
    return [_PATTERN.get(letter, letter) for letter in config.get("hybrid_override_pattern", "")]


def _state_space(config: Config) -> StateSpaceSpec:
    num_heads, num_groups = heads_and_groups(config, "mamba_num_heads", "n_groups")
    return StateSpaceSpec(
        num_groups=num_groups,
        num_heads=num_heads,
        state_dim=positive_int(config, "ssm_state_size"),
        head_dim=positive_int(config, "mamba_head_dim"),
        width=positive_int(config, "conv_kernel"),
        conv_bias=bool(config["use_conv_bias"]),
        bias=bool(config.get("use_bias")),
    )


def _mlp(config: Config, size: str) -> MlpSpec:
    return MlpSpec(intermediate_size=positive_int(config, size), bias=bool(config.get("mlp_bias")), gate=None)


def _experts(config: Config) -> ExpertsSpec:
    return ExpertsSpec(
        router=grouped_router_spec(config),
        inner=positive_int(config, "moe_intermediate_size"),
        gate=None,
        shared=_mlp(config, "moe_shared_expert_intermediate_size"),
    )


def _refuse_unsupported(config: Config) -> None:
    """Refuse what would otherwise be computed differently.

    Raises:
        ValueError: If config.json has it.
    """
    refuse_step_limits(config)
    for key, supported in {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}.items():
        if config.get(key, supported) != supported:
            raise ValueError(f"config.json: {key} = {config[key]!r} is not supported; only {supported!r} is")
    if config.get("residual_in_fp32"):
        raise ValueError("config.json: residual_in_fp32 = True is not supported; only False is")
    if config.get("moe_latent_size") is not None:
        raise ValueError(f"config.json: moe_latent_size = {config['moe_latent_size']!r} is not supported; only null is")
