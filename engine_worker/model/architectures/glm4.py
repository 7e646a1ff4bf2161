"""GLM-4 9B (`glm`) and the GLM-4 and Z1 of 0414 (`glm4`), which norm what a part adds as well.

Neighbouring elements of the first half of a head are rotated; gate and up are one tensor of the checkpoint. It is used
once, at a worker's start: it makes a ModelSpec of config.json, of which network.py is built. It knows no tensors and no
steps.
"""

from engine_worker.model.architectures.config_keys import Config, refuse_unsupported, refuse_windows, rope_of
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec
from engine_worker.model.spec import LayerSpec, ModelSpec, NamesSpec

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
        attention=attention_spec(config, rope=rope, qkv_bias=bool(config.get("attention_bias", True))),
        mlp=mlp_spec(config),
        norms_after=config["model_type"] == "glm4",
    )
    return model_spec(config, generation, layer, names=NAMES)
