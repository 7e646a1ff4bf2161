"""The tensors of a GGUF file as bf16 safetensors under their Hugging Face names.

llama.cpp stores the rows of Q and K so that a rotary pair is adjacent (2i, 2i+1); Hugging Face keeps the halves apart
(i, i + head_dim/2). The rows are put back here, or attention would rotate the wrong pairs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize

from engine_worker.gguf_config import ConversionError

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_safetensors(
    reader: GGUFReader, config: dict[str, Any], path: Path, report: Callable[[float, str], None]
) -> None:
    """Tensor after tensor straight into the file, so that a conversion needs the memory of its largest tensor only.

    The format is a length, a JSON header and the data; safetensors' own writer wants every tensor in memory at once.
    """
    header = json.dumps({"__metadata__": {"format": "pt"}, **_table_of_contents(reader.tensors)}).encode()
    header += b" " * (-len(header) % 8)  # the data begins aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for number, tensor in enumerate(reader.tensors, start=1):
            file.write(_converted(tensor, config).tobytes())
            if number % 64 == 0 or number == len(reader.tensors):
                report(number / len(reader.tensors), f"converted {number} of {len(reader.tensors)} tensors")


def hugging_face_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
    raise ConversionError(f"tensor {name} has no place in a Llama network")


def undo_rotary_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper 16 bits, rounded to nearest even as torch does. Weights hold no NaN or infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _table_of_contents(tensors: list[ReaderTensor]) -> dict[str, Any]:
    contents = {}
    end = 0
    for tensor in tensors:
        start, end = end, end + int(tensor.n_elements) * 2
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        contents[hugging_face_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    return contents


def _converted(tensor: ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    values = _dequantised(tensor)
    if tensor.name.endswith(".attn_q.weight"):
        values = undo_rotary_permutation(values, config["num_attention_heads"])
    elif tensor.name.endswith(".attn_k.weight"):
        values = undo_rotary_permutation(values, config["num_key_value_heads"])
    return to_bfloat16_bits(values)


def _dequantised(tensor: ReaderTensor) -> np.ndarray:
    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = GGMLQuantizationType(tensor.tensor_type).name
        raise ConversionError(f"tensor {tensor.name}: type {kind} cannot be dequantised") from None
