"""Write the quantized tensors of a GGUF file unchanged to stored_blocks.safetensors.

Each is [rows, bytes per row] under its Hugging Face name; the metadata hold its type. Only types that a CPU multiplies
directly are written: blocks of 32 numbers with a scale. model/quantization/stored_blocks.py reads them.
"""

from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from engine_worker.gguf.weights import Tensor, undo_rotary_permutation
from engine_worker.model.weight_format import STORED_BLOCKS

TYPES = (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0)


def write_stored_blocks(tensors: list[Tensor], directory: Path) -> None:
    """Write the tensors with supported types; without any, no file is written."""
    kept = [tensor for tensor in tensors if tensor.source.tensor_type in TYPES and len(tensor.shape) == 2]
    if not kept:
        return
    types = {tensor.name: gguf.GGMLQuantizationType(tensor.source.tensor_type).name for tensor in kept}
    path = directory / STORED_BLOCKS
    save_file({tensor.name: _rows(tensor) for tensor in kept}, path, metadata=types)
    path.chmod(0o644)  # save_file() makes 0600


def _rows(tensor: Tensor) -> np.ndarray:
    rows = np.ascontiguousarray(tensor.source.data).reshape(tensor.shape[0], -1)
    return np.ascontiguousarray(undo_rotary_permutation(rows, tensor.num_heads) if tensor.num_heads else rows)
