"""The quantized tensors of a GGUF file as they lie in it, beside their dequantized copies: stored_blocks.safetensors.

Each is [rows, bytes of a row] under its Hugging Face name; the file's metadata have its type. Only types that a CPU
multiplies as they are: blocks of 32 numbers with a scale. Who reads them: model/quantization/stored_blocks.py. It is
used once a file, by convert_gguf.py; it knows no layer and no product.
"""

from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from engine_worker.gguf.weights import Tensor, undo_rotary_permutation
from engine_worker.model.weight_format import STORED_BLOCKS

TYPES = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0)


def write_stored_blocks(tensors: list[Tensor], directory: Path) -> None:
    """Nothing is written where no tensor has such a type."""
    kept = [tensor for tensor in tensors if tensor.source.tensor_type in TYPES and len(tensor.shape) == 2]
    if not kept:
        return
    types = {tensor.name: gguf.GGMLQuantizationType(tensor.source.tensor_type).name for tensor in kept}
    path = directory / STORED_BLOCKS
    save_file({tensor.name: _rows(tensor) for tensor in kept}, path, metadata=types)
    path.chmod(0o644)  # the library makes it 0600


def _rows(tensor: Tensor) -> np.ndarray:
    rows = np.ascontiguousarray(tensor.source.data).reshape(tensor.shape[0], -1)
    return np.ascontiguousarray(undo_rotary_permutation(rows, tensor.num_heads) if tensor.num_heads else rows)
