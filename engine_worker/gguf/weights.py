"""Write the tensors of a GGUF file as dequantized safetensors under their Hugging Face names.

The ModelSpec gives the expected tensors, and the package `gguf` llama.cpp's names for them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine_worker.gguf.config import ROPE_TENSORS
from engine_worker.gguf.metadata import ConversionError, GgufFile
from engine_worker.model.architectures.gguf_family import GgufFamily
from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.spec import ModelSpec

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}  # safetensors' name, itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint and its source in the GGUF file.

    Attributes:
        name: Hugging Face name.
        shape: Shape in the checkpoint.
        source: The GGUF tensor.
        num_heads: Heads whose rotary permutation must be undone, or 0.
        offset: What llama.cpp's converter added to the values.
    """

    name: str
    shape: tuple[int, ...]
    source: gguf.ReaderTensor
    num_heads: int = 0
    offset: float = 0.0


def tensors_of(file: GgufFile, spec: ModelSpec, family: GgufFamily) -> list[Tensor]:
    """Return the tensors of a model.

    Raises:
        ConversionError: If a tensor is missing, has another shape, or is unused.
    """
    table = gguf.get_tensor_name_map(_architecture(file.architecture), spec.num_layers)
    found = [_find(file, table, name, shape) for name, shape in checkpoint_tensors(spec).items()]
    surplus = sorted(file.tensors.keys() - {tensor.source.name for tensor in found} - set(ROPE_TENSORS))
    if surplus:
        names = f"{len(surplus)} tensors with no place in {family.class_name}: {', '.join(surplus[:4])}"
        raise ConversionError(f"the GGUF file has {names}")
    if family.norm_offset:
        found = [replace(each, offset=family.norm_offset) if _is_norm(each) else each for each in found]
    if not family.has_adjacent_pairs:
        return found
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    return [
        Tensor(tensor.name, tensor.shape, tensor.source, heads.get(tensor.source.name.split(".")[-2], 0))
        for tensor in found
    ]


def write_safetensors(tensors: list[Tensor], dtype: str, path: Path, report: Callable[[float, str], None]) -> None:
    """Write one tensor after another, so a conversion needs memory only for the largest tensor.

    The format is a length, a JSON header and the data; safetensors' own writer needs all tensors in memory.
    """
    contents = _table_of_contents(tensors, dtype)
    header = json.dumps({"__metadata__": {"format": "pt"}, **contents}).encode()
    header += b" " * (-len(header) % 8)  # the data must be aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for number, tensor in enumerate(tensors, start=1):
            file.write(_in_dtype(_values(tensor), dtype).tobytes())
            if number % 64 == 0 or number == len(tensors):
                report(number / len(tensors), f"converted {number} of {len(tensors)} tensors")


def undo_rotary_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows from adjacent rotary pairs (llama.cpp) to split halves (Hugging Face)."""
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of finite float32 values, rounded to nearest even as torch does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(architecture for architecture, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _find(file: GgufFile, table: gguf.TensorNameMap, name: str, shape: tuple[int, ...]) -> Tensor:
    known = table.get_name(name, try_suffixes=(".weight", ".bias"))
    source = file.tensors.get(known or "")
    if source is None:
        raise ConversionError(f"the GGUF file has no {known or name}")
    found = tuple(int(size) for size in reversed(source.shape))  # GGUF lists the fastest dimension first
    if found != shape:
        raise ConversionError(f"tensor {known} has shape {found}; the file's metadata imply {shape}")
    return Tensor(name, shape, source)


def _table_of_contents(tensors: list[Tensor], dtype: str) -> Mapping[str, Any]:
    name, itemsize = _DTYPES[dtype]
    contents = {}
    end = 0
    for tensor in tensors:
        start, end = end, end + int(tensor.source.n_elements) * itemsize
        contents[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    return contents


def _is_norm(tensor: Tensor) -> bool:
    return tensor.source.name.endswith("norm.weight")


def _values(tensor: Tensor) -> np.ndarray:
    values = _dequantized(tensor.source)
    if tensor.offset:
        values = values - np.float32(tensor.offset)
    return undo_rotary_permutation(values, tensor.num_heads) if tensor.num_heads else values


def _in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    return to_bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def _dequantized(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = gguf.GGMLQuantizationType(tensor.tensor_type).name
        raise ConversionError(f"tensor {tensor.name}: type {kind} cannot be dequantized") from None
