"""Make config.json and generation_config.json from the metadata of a GGUF file."""

from typing import Any

import numpy as np

from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.model.architectures.gguf_family import GgufFamily

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALING_TYPES = ("none", "linear", "yarn", "longrope")

# Control tokens that end a turn or a text besides the file's own end token; llama.cpp stops at them, too.
_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"})
# In the format of gpt-oss, <|end|> ends a message of an answer, and these end the answer.
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})
_CONTROL = 3  # gguf.TokenType.CONTROL


def model_config(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """Return the config.json of a GGUF file.

    Raises:
        ConversionError: If the file has no required key, or the model is not supported.
    """
    if bool(file.of_model("expert_count", 0)) != family.has_experts:
        kind = f"{file.architecture!r} {'without' if family.has_experts else 'with'} experts"
        raise ConversionError(f"GGUF architecture {kind} is not supported")
    num_heads, hidden_size = (file.of_model_required(key) for key in ("attention.head_count", "embedding_length"))
    head_dim = file.of_model("attention.key_length", hidden_size // num_heads)
    rotated = file.of_model("rope.dimension_count", head_dim)
    by_layer, kv_heads = family.has_kv_heads_by_layer, "attention.head_count_kv"
    config = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": _embedding_rows(file),
        "hidden_size": hidden_size,
        "intermediate_size": file.of_model_required("feed_forward_length"),
        "num_hidden_layers": file.of_model_required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.of_layers(kv_heads) if by_layer else file.of_model(kv_heads, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.of_model_required("context_length"),
        "rms_norm_eps": _shortest(file.of_model_required("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.of_model("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": _dtype(file),
        **_token_ids(file),
        **(_experts(file) if family.has_experts else {}),
        **{name: file.of_model_required(key) for name, key in family.keys.items()},
        **family.config,
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if window := file.of_model("attention.sliding_window", 0):
        config["sliding_window"] = window
    if theta := file.of_model("rope.freq_base_swa", 0):
        config["rope_local_base_freq"] = _shortest(theta)
    if scaling := _rope_scaling(file, config["max_position_embeddings"], rotated):
        config["rope_scaling"] = scaling
        config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return {**config, **family.derived(config)}


def generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the generation_config.json of a GGUF file."""
    found = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    ends = end_token_ids(file)
    return found | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def end_token_ids(file: GgufFile) -> list[int]:
    """Return the file's end token first, then all other tokens that end a turn or a text."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [token_id for key in keys if (token_id := file.get(key)) is not None]
    tokens, types = file.required("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", [])
    is_harmony = set(tokens) >= _HARMONY_ENDS
    names = _ENDS - {"<|end|>"} | _HARMONY_ENDS if is_harmony else _ENDS
    is_end = [type_ == _CONTROL and token in names for token, type_ in zip(tokens, types, strict=False)]
    ids += [token_id for token_id, ends in enumerate(is_end) if ends]
    return list(dict.fromkeys(ids))


def _token_ids(file: GgufFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _experts(file: GgufFile) -> dict[str, int]:
    keys = {
        "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }  # fmt: skip
    return {name: file.of_model_required(key) for name, key in keys.items()}


def _rope_scaling(file: GgufFile, longest: int, rotated: int) -> dict[str, Any] | None:
    """Return the rope scaling; factor tables are kept, because each frequency is divided by its own factor."""
    kind = file.of_model("rope.scaling.type", "none")
    if kind not in _SCALING_TYPES:
        raise ConversionError(f"rope scaling {kind!r} is not supported; supported: {', '.join(_SCALING_TYPES)}")
    original = file.of_model("rope.scaling.original_context_length", longest)
    long, short = (_factors(file, f"rope_{name}.weight", rotated) for name in ("factors_long", "factors_short"))
    if (one := _factors(file, "rope_freqs.weight", rotated)) is not None:
        long = short = one
    if long is not None and short is not None:
        return {
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "attention_factor": _shortest(file.of_model("rope.scaling.attn_factor", 1.0)),
            "original_max_position_embeddings": original,
        }  # fmt: skip
    if kind in {"linear", "yarn"}:
        factor = _shortest(file.of_model_required("rope.scaling.factor"))
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "longrope":
        raise ConversionError("the GGUF file has no rope_factors_long.weight and rope_factors_short.weight")
    return None


def _factors(file: GgufFile, name: str, rotated: int) -> list[float] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.data.dtype != np.float32 or tensor.data.shape != (rotated // 2,):
        raise ConversionError(f"{name} must have {rotated // 2} float32 values, one per frequency")
    return [float(value) for value in tensor.data]


def _dtype(file: GgufFile) -> str:
    """Return the largest tensor's dtype if it is a float, else bfloat16, which represents every quantized type."""
    largest = max(file.tensors.values(), key=lambda tensor: int(tensor.n_elements), default=None)
    kind = "" if largest is None else largest.tensor_type.name
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _embedding_rows(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConversionError("the GGUF file has no token_embd.weight")
    return int(file.tensors["token_embd.weight"].shape[1])  # GGUF lists the fastest dimension first


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
