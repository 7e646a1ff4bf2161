"""Phi-3, 3.5 and 4: fused tensors in the checkpoint; the mini models rotate a part of a head, with longrope."""

from engine_worker.model.architectures.config_keys import Config, layer_types_of, refuse_unsupported, windows_of
from engine_worker.model.architectures.decoder import attention_spec, mlp_spec, model_spec, with_windows
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.spec import LayerSpec, ModelSpec
from engine_worker.model.specs.names import NamesSpec

NAMES = NamesSpec(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

GGUF = GgufFamily(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    # As in the original tokenizer.json; llama.cpp derives it from the model's name.
    tokens_that_keep_space=frozenset({"<unk>", "<s>", "<|endoftext|>"}),
)


def spec(config: Config, generation: Config) -> ModelSpec:
    refuse_unsupported(config)
    layer = LayerSpec(mixer=attention_spec(config), mlp=mlp_spec(config))
    kinds = layer_types_of(config, lambda index: config.get("sliding_window") is not None)
    return with_windows(model_spec(config, generation, layer, names=NAMES), windows_of(config, kinds))
