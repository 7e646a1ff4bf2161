"""GLM-4 9B (`glm`), and GLM-4 and Z1 of 0414 (`glm4`), which also norm what a part adds.

The first half of a head is rotated, in adjacent pairs. Gate and up are one tensor of the checkpoint.
"""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows, rope_of
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.names import NamesSpec

NAMES = NamesSpec(
    gate_up=("mlp.gate_up_proj",),
    after_attention="post_self_attn_layernorm",
    after_mlp="post_mlp_layernorm",
)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    refuse_windows(config)
    rope = rope_of({"partial_rotary_factor": 0.5, **config}, interleaved=True)
    layer = LayerSpec(
        mixer=attention_spec(config, rope=rope, qkv_bias=bool(config.get("attention_bias", True))),
        mlp=mlp_spec(config),
        norms_after=config["model_type"] == "glm4",
    )
    return model_spec(config, generation, layer, names=NAMES)
