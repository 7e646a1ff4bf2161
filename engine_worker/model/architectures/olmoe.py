"""OLMoE: all layers have experts, and queries and keys are normed over all their heads."""

from engine_worker.model.architectures.config_keys import Config, positive_int, refuse_unsupported, refuse_windows
from engine_worker.model.architectures.decoder import attention_spec, model_spec
from engine_worker.model.architectures.experts_keys import router_spec
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.attention import QkNorm
from engine_worker.model.specs.experts import ExpertsSpec


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    if config.get("clip_qkv") is not None:
        raise ValueError(f"config.json: clip_qkv = {config['clip_qkv']!r} is not supported; set it to null")
    bias = bool(config.get("attention_bias"))
    experts = ExpertsSpec(
        router=router_spec(config, renormalize=bool(config.get("norm_topk_prob"))),
        inner=positive_int(config, "intermediate_size"),
    )
    attention = attention_spec(config, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.WHOLE)
    return model_spec(config, generation, LayerSpec(mixer=attention, mlp=experts))
