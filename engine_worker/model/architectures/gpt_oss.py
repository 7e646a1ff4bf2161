"""gpt-oss: experts with clamped gates, biases everywhere, sinks, and a window in every other layer."""

from dataclasses import replace

from engine_worker.model.architectures.config_keys import (
    Config,
    layer_types_of,
    number_of,
    positive_int,
    refuse_unsupported,
    rope_of,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, model_spec, with_windows
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.experts import ExpertsSpec, Scoring
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.specs.names import ExpertNames, NamesSpec

NAMES = NamesSpec(
    experts=ExpertNames(router="mlp.router", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")
)
# Defaults of transformers' configuration class.
_ROPE = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128}


def _of_gguf(config: Config) -> dict[str, object]:
    return {
        "num_local_experts": config["num_experts"],
        "intermediate_size": config["moe_intermediate_size"],
        "rope_scaling": {**config.get("rope_scaling", {"rope_type": "default"}), "truncate": False},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _DENSE},
    }


GGUF = GgufFamily(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    config={"torch_dtype": "bfloat16"},  # as published
    derived=_of_gguf,
    has_experts=True,
    has_mxfp4=True,
)


def spec(config: Config, generation: Config) -> ModelSpec:
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    config = {**_DEFAULTS, **({} if has_rope else {"rope_parameters": _ROPE}), **config}
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias", True))
    attention = attention_spec(
        config, rope=rope_of(config, default_theta=150_000.0), qkv_bias=bias, out_bias=bias, sinks=True
    )
    limit = number_of(config, "swiglu_limit", 7.0)
    experts = ExpertsSpec(
        router=router_spec(config, scoring=Scoring.SOFTMAX_OF_CHOSEN, bias=True),
        inner=positive_int(config, "intermediate_size"),
        gate=GateSpec(alpha=number_of(config, "swiglu_alpha", 1.702), limit=limit, up_offset=1.0),
        bias=True,
        interleaved=True,
        transposed=not config.get("quantization_config"),  # MXFP4 blocks run along the inputs
    )
    whole = model_spec(config, generation, LayerSpec(mixer=attention, mlp=experts))
    kinds = layer_types_of(config, lambda index: index % 2 == 0)
    return with_windows(replace(whole, names=NAMES), windows_of(config, kinds))
