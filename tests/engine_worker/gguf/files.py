"""Write GGUF files of tiny transformers models with gguf's own writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "1", "2", "12"]

KEPT_DTYPES = {Kind.F32: torch.float32, Kind.F16: torch.float16}  # other kinds become bfloat16


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: Kind,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write `model` to `path` and give the model the values that the file holds.

    Matrices are of `kind`, everything else is float32. Q and K rows of a Llama are permuted as in llama.cpp.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    types, kv_heads = getattr(config, "layer_types", None) or [], config.num_key_value_heads
    writer.add_head_count_kv([0 if each == "conv" else kv_heads for each in types] if "conv" in types else kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    write_vocabulary(writer)
    add(writer)
    table = gguf.get_tensor_name_map(architecture_number(architecture), config.num_hidden_layers)
    for name, tensor in (part for named in model.named_parameters() for part in parts_of(*named)):
        permuted = heads.get(name.split(".")[-2], 0) if architecture == "llama" else 0
        offset = 1.0 if architecture == "gemma3" and "norm" in name else 0.0  # added by llama.cpp's converter
        values = permuted_as_llama_cpp_does(tensor.numpy() + np.float32(offset), permuted)
        is_filter = name.endswith("conv.conv.weight")
        values = values.squeeze(1) if is_filter else values
        data, stored = quantized(values, Kind.F32 if is_filter or values.ndim == 1 else kind)
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        writer.add_tensor(known, data, raw_dtype=stored)
        kept = torch.from_numpy(gguf.dequantize(data, stored) - np.float32(offset))
        if values.ndim < 3:  # blocks of experts are not rounded to 16 bits
            kept = kept.to(KEPT_DTYPES.get(kind, torch.bfloat16)).float()
        tensor.copy_(torch.from_numpy(permuted_back(kept.numpy(), permuted)).view(tensor.shape))
    finish(writer)


def parts_of(name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter with the names of llama.cpp's table; gate and up of experts are two."""
    whole = parameter.data
    if name.endswith("experts.gate_up_proj"):
        gate, up = whole.chunk(2, dim=1)
        return [(name.replace("gate_up", part) + ".weight", half) for part, half in (("gate", gate), ("up", up))]
    return [(f"{name}.weight" if ".experts." in name else name, whole)]


def write_vocabulary(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(0)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_number(name: str) -> gguf.MODEL_ARCH:
    return next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def quantized(values: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """Quantize with gguf; K-quants, which gguf only reads, become random blocks of a usual deviation."""
    if kind in K_SCALES:
        return random_blocks(values.shape, kind), kind
    return gguf.quantize(np.ascontiguousarray(values), kind), kind


# Offsets of the float16 scales in a block and their values: those of the quants and of the minima
# (llama.cpp's block_q4_K, block_q5_K and block_q6_K).
K_SCALES: dict[Kind, dict[int, float]] = {
    Kind.Q4_K: {0: 0.0012, 2: 0.009},
    Kind.Q5_K: {0: 0.0006, 2: 0.009},
    Kind.Q6_K: {208: 0.00015},
}


def random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    assert shape[-1] % block_size == 0
    source = np.random.default_rng(sum(shape))
    blocks = source.integers(0, 256, (*shape[:-1], shape[-1] // block_size, type_size), dtype=np.uint8)
    for place, scale in K_SCALES[kind].items():
        blocks[..., place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def permuted_as_llama_cpp_does(weight: np.ndarray, num_heads: int) -> np.ndarray:
    if not num_heads:
        return weight
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def permuted_back(weight: np.ndarray, num_heads: int) -> np.ndarray:
    if not num_heads:
        return weight
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tiny_options(**changes: Any) -> dict[str, Any]:
    """Return a config of hidden size 256, the block size of K-quants."""
    return {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.1, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        **changes,
    }  # fmt: skip
