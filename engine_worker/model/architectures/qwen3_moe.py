"""Qwen3 with experts: a softmax over all of them, and some layers may be dense."""

from engine_worker.model.architectures.config_keys import (
    FULL,
    SLIDING,
    Config,
    positive_int,
    refuse_unsupported,
    windows_of,
)
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec, with_windows
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import QkNorm
from engine_worker.model.specs.experts import ExpertsSpec

GGUF = GgufFamily(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    config={"norm_topk_prob": True},
    has_experts=True,
)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    bias = bool(config.get("attention_bias"))
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.HEAD)
    experts = ExpertsSpec(
        router=router_spec(config, renormalize=bool(config.get("norm_topk_prob"))),
        inner=positive_int(config, "moe_intermediate_size"),
    )
    num_layers = positive_int(config, "num_hidden_layers")
    step = positive_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or ()
    layers = tuple(
        LayerSpec(mixer=attention, mlp=mlp_spec(config) if index in dense or (index + 1) % step else experts)
        for index in range(num_layers)
    )
    kind = SLIDING if config.get("use_sliding_window") and config.get("sliding_window") else FULL
    whole = model_spec(config, generation, layers[0], layers=layers)
    return with_windows(whole, windows_of(config, [kind] * num_layers))
