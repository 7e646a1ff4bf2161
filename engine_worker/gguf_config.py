"""config.json from the metadata of a GGUF file, and the one error of the conversion. Knows nothing of tensors' data."""

from typing import Any

import numpy as np
from gguf import GGUFReader


class ConversionError(ValueError):
    """This GGUF file cannot be converted faithfully; the message says what is in the way."""


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    entry = reader.get_field(key)
    return default if entry is None else entry.contents()


def required(reader: GGUFReader, key: str) -> Any:
    value = field(reader, key)
    if value is None:
        raise ConversionError(f"the GGUF file has no {key}")
    return value


def model_config(reader: GGUFReader) -> dict[str, Any]:
    architecture = required(reader, "general.architecture")
    if architecture != "llama":
        raise ConversionError(f"architecture {architecture!r} is not supported; only 'llama' is")
    names = {tensor.name for tensor in reader.tensors}
    scaling = field(reader, "llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ConversionError("scaled rotary embedding is not supported from GGUF; convert the original safetensors")
    if field(reader, "llama.expert_count", 0):
        raise ConversionError("mixture-of-experts models are not supported")
    num_heads = required(reader, "llama.attention.head_count")
    hidden_size = required(reader, "llama.embedding_length")
    head_dim = field(reader, "llama.attention.key_length", hidden_size // num_heads)
    if field(reader, "llama.rope.dimension_count", head_dim) != head_dim:
        raise ConversionError("rotary embedding over a part of the head is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _embedding_rows(reader),
        "hidden_size": hidden_size,
        "intermediate_size": required(reader, "llama.feed_forward_length"),
        "num_hidden_layers": required(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": required(reader, "llama.context_length"),
        "rms_norm_eps": _shortest(required(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(field(reader, "llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = field(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _embedding_rows(reader: GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])  # GGUF lists the fastest dimension first
    raise ConversionError("the GGUF file has no token_embd.weight")


def _shortest(value: float) -> float:
    """GGUF stores float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
