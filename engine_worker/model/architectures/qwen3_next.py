"""Qwen3-Next, and the text of Qwen3.5 to 3.8: Gated DeltaNet in most layers, gated attention in the others."""

from dataclasses import replace
from typing import Any

from engine_worker.model.architectures.config_keys import (
    FULL,
    LINEAR,
    Config,
    mixers_by_type,
    number_of,
    positive_int,
    refuse_unsupported,
    rope_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.spec import LayerSpec, ModelSpec, MtpSpec
from engine_worker.model.specs.attention import AttentionSpec, QkNorm
from engine_worker.model.specs.experts import ExpertsSpec
from engine_worker.model.specs.gated_delta import GatedDeltaSpec
from engine_worker.model.specs.mlp import MlpSpec
from engine_worker.model.specs.names import DeltaNames, ExpertNames, MtpNames, NamesSpec

# Files of text and images have each layer's experts in two tensors.
_NAMES = NamesSpec(experts=ExpertNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")))
_FUSED = replace(_NAMES, delta=DeltaNames(enter=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")))
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mtp_num_hidden_layers": 1,
}  # fmt: skip


def spec(config: Config, generation: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    refuse_unsupported(config)
    is_fused = config["model_type"] == "qwen3_next"
    bias = bool(config.get("attention_bias"))
    attention = attention_spec(
        config, rope=rope_of(config), qk_norm=QkNorm.HEAD, qkv_bias=bias, out_bias=bias, output_gate=True
    )
    kinds: dict[str, AttentionSpec | GatedDeltaSpec] = {FULL: attention, LINEAR: _delta(config, is_fused=is_fused)}
    layers = tuple(
        LayerSpec(mixer=mixer, mlp=_mlp(config, index))
        for index, mixer in enumerate(mixers_by_type(config, _layer_types(config), kinds))
    )
    has_mtp = number_of(config, "mtp_num_hidden_layers") > 0
    names = _FUSED if is_fused else _NAMES
    mtp_layer = LayerSpec(mixer=attention, mlp=_mlp(config, 0))
    mtp = MtpSpec(layer=mtp_layer, names=MtpNames(), layer_names=names) if has_mtp else None
    return model_spec(config, generation, layers[0], layers=layers, norm_offset=1.0, names=names, mtp=mtp)


def _delta(config: Config, *, is_fused: bool) -> GatedDeltaSpec:
    """Return the recurrent mixer.

    Raises:
        ValueError: If its heads do not divide.
    """
    delta = GatedDeltaSpec(
        num_key_heads=positive_int(config, "linear_num_key_heads"),
        num_heads=positive_int(config, "linear_num_value_heads"),
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        width=positive_int(config, "linear_conv_kernel_dim"),
        interleaved=is_fused,
    )
    if delta.num_heads % delta.num_key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads {delta.num_heads} must be a multiple of linear_num_key_heads "
            f"{delta.num_key_heads}"
        )
    return delta


def _layer_types(config: Config) -> list[str]:
    """Return layer_types; without them, every full_attention_interval-th layer attends."""
    if config.get("layer_types") is not None:
        return list(config["layer_types"])
    interval = positive_int({"full_attention_interval": 4, **config}, "full_attention_interval")
    return [LINEAR if (index + 1) % interval else FULL for index in range(positive_int(config, "num_hidden_layers"))]


def _mlp(config: Config, index: int) -> MlpSpec | ExpertsSpec:
    """Return the MLP of a layer: experts beside a shared one, unless the layer or the model is dense."""
    is_dense = index in (config.get("mlp_only_layers") or ()) or (index + 1) % positive_int(
        config, "decoder_sparse_step"
    )
    if not number_of(config, "num_experts") or is_dense:
        return mlp_spec(config)
    return ExpertsSpec(
        router=router_spec(config, renormalize=bool(config["norm_topk_prob"])),
        inner=positive_int(config, "moe_intermediate_size"),
        shared=MlpSpec(intermediate_size=positive_int(config, "shared_expert_intermediate_size")),
        shared_gate=True,
    )
