"""Write the tensors of a GGUF file: dequantized to model.safetensors, and those in blocks to stored_blocks.safetensors.

Of quantized experts, only blocks are written, because their 16-bit numbers would be most of the directory. A reader
that needs them dequantizes the blocks.

Threads convert some rows each, which are written in order, so a conversion needs memory only for those; safetensors'
own writer needs all tensors. The format is a length, a JSON header and the data.
"""

import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from engine_worker.gguf.mxfp4 import ExpertTensor
from engine_worker.gguf.stored_blocks import block_type, blocks_of
from engine_worker.gguf.weights import Tensor, stored_rows, to_bfloat16_bits, values_of
from engine_worker.model.weight_format import STORED_BLOCKS

_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}  # safetensors' name, itemsize
_PIECE = 2**20  # numbers that a thread converts at once
_THREADS = min(16, os.cpu_count() or 1)
_Piece = tuple[int, Tensor, np.ndarray]  # the tensor's number, the tensor, some of its stored_rows()
_Result = tuple[int, bytes, bytes]
_Entry = tuple[str, str, Sequence[int], int]  # name, dtype, shape, bytes


def write_tensors(
    tensors: Sequence[Tensor],
    experts: Sequence[ExpertTensor],
    dtype: str,
    directory: Path,
    report: Callable[[float, str], None],
) -> None:
    """Write both files; the second one only if a tensor has blocks, and no `experts` have a format of their own.

    Raises:
        ConversionError: If a tensor cannot be dequantized.
    """
    name, itemsize = _DTYPES[dtype]
    types = {each.name: kind for each in tensors if (kind := block_type(each)) is not None and not experts}
    only_blocks = {each.name for each in tensors if each.expert is not None and each.name in types}
    whole: list[_Entry] = [
        (each.name, name, each.shape, math.prod(each.shape) * itemsize)
        for each in tensors
        if each.name not in only_blocks
    ]
    whole += [(each.name, each.dtype, each.shape, each.num_bytes) for each in experts]
    blocks = [_entry_of_blocks(each, types[each.name]) for each in tensors if each.name in types]
    with ExitStack() as files:
        of_values = files.enter_context(_open(directory / "model.safetensors", whole, {"format": "pt"}))
        of_blocks = None
        if blocks:
            metadata = {name: kind.name for name, kind in types.items()}
            of_blocks = files.enter_context(_open(directory / STORED_BLOCKS, blocks, metadata))
        pool = files.enter_context(ThreadPoolExecutor(_THREADS))

        def converted(number: int, tensor: Tensor, rows: np.ndarray) -> tuple[int, bytes, bytes]:
            values = None if tensor.name in only_blocks else values_of(tensor, rows)
            made = blocks_of(tensor, rows, values).tobytes() if tensor.name in types else b""
            return number, b"" if values is None else _in_dtype(values, dtype).tobytes(), made

        written = 0
        for number, of_dtype, made in _in_order(pool, converted, _pieces(tensors)):
            of_values.write(of_dtype)
            if of_blocks is not None:
                of_blocks.write(made)
            if number // 64 > written // 64:
                report(number / len(tensors), f"converted {number} of {len(tensors)} tensors")
            written = number
        for each in experts:
            of_values.writelines(each.pieces())
        report(1.0, f"converted all {len(tensors)} tensors")
    if changed := _changed(tensors, types):
        report(1.0, f"in blocks: {changed}")


def _pieces(tensors: Sequence[Tensor]) -> Iterator[_Piece]:
    for number, tensor in enumerate(tensors):
        rows = stored_rows(tensor)
        at_once = max(1, _PIECE * len(rows) // math.prod(tensor.shape))
        for start in range(0, len(rows), at_once):
            yield number, tensor, rows[start : start + at_once]


def _in_order(pool: Executor, work: Callable[..., _Result], pieces: Iterable[_Piece]) -> Iterator[_Result]:
    """Yield the results of all pieces; a few are worked on ahead."""
    begun: deque[Future[_Result]] = deque()
    for piece in pieces:
        begun.append(pool.submit(work, *piece))
        if len(begun) > 2 * _THREADS:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


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
