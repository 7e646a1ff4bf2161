"""Write the tensors of a GGUF file: dequantized to model.safetensors, and those in blocks to stored_blocks.safetensors.

Blocks of experts are not dequantized, because they would take four times the space of all else; readers do it.

One tensor is written after another, so a conversion needs memory only for the largest; safetensors' own writer needs
all of them. The format is a length, a JSON header and the data.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from engine_worker.gguf.stored_blocks import block_type, blocks_of
from engine_worker.gguf.weights import Tensor, values_of
from engine_worker.model.weight_format import STORED_BLOCKS

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}  # safetensors' name, itemsize
_AT_ONCE = 2**18  # numbers: their intermediate results stay in a cache, which takes a tenth of the time
_Entry = tuple[str, str, Sequence[int], int]  # name, dtype, shape, bytes


def write_tensors(tensors: Sequence[Tensor], dtype: str, directory: Path, report: Callable[[float, str], None]) -> None:
    """Write both files; the second one only if a tensor has blocks.

    Raises:
        ConversionError: If a tensor cannot be dequantized.
    """
    name, itemsize = _DTYPES[dtype]
    types = {each.name: kind for each in tensors if (kind := block_type(each)) is not None}
    only_blocks = {each.name for each in tensors if each.expert is not None and each.name in types}
    whole: list[_Entry] = [
        (each.name, name, each.shape, math.prod(each.shape) * itemsize)
        for each in tensors
        if each.name not in only_blocks
    ]
    blocks = [_entry_of_blocks(each, types[each.name]) for each in tensors if each.name in types]
    with ExitStack() as files:
        of_values = files.enter_context(_open(directory / "model.safetensors", whole, {"format": "pt"}))
        of_blocks = None
        if blocks:
            metadata = {name: kind.name for name, kind in types.items()}
            of_blocks = files.enter_context(_open(directory / STORED_BLOCKS, blocks, metadata))
        for number, tensor in enumerate(tensors, start=1):
            values = None if tensor.name in only_blocks else values_of(tensor)
            if values is not None:
                of_values.write(_in_dtype(values, dtype).tobytes())
            if of_blocks is not None and tensor.name in types:
                of_blocks.write(blocks_of(tensor, values).tobytes())
            if number % 64 == 0 or number == len(tensors):
                report(number / len(tensors), f"converted {number} of {len(tensors)} tensors")
    if changed := _changed(tensors, types):
        report(1.0, f"for CPUs: {changed}")


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of finite float32 values, rounded to nearest even as torch does."""
    all_bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    found = np.empty(all_bits.shape, np.uint16)
    for start in range(0, len(all_bits), _AT_ONCE):
        bits = all_bits[start : start + _AT_ONCE]
        found[start : start + _AT_ONCE] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return found.reshape(values.shape)


def _changed(tensors: Sequence[Tensor], types: Mapping[str, gguf.GGMLQuantizationType]) -> str:
    """Return which types became others, such as `13 tensors of Q6_K as Q8_0`."""
    pairs = Counter((each.kind.name, types[each.name].name) for each in tensors if each.name in types)
    return ", ".join(f"{count} tensors of {kind} as {kept}" for (kind, kept), count in pairs.items() if kind != kept)


def _entry_of_blocks(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> _Entry:
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = tensor.shape
    shape = rows, columns // numbers * size
    return tensor.name, "U8", shape, shape[0] * shape[1]


@contextmanager
def _open(path: Path, entries: Sequence[_Entry], metadata: Mapping[str, str]) -> Iterator[BinaryIO]:
    """Open a safetensors file whose data follow in the order of the entries."""
    contents: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in entries:
        start, end = end, end + size
        contents[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(contents).encode()
    header += b" " * (-len(header) % 8)  # the data must be aligned to 8 bytes
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        yield file


def _in_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    return to_bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
