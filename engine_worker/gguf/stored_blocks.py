"""Make blocks of 32 numbers with one scale, which a CPU multiplies directly, of a GGUF file's quantized tensors.

Q4_0, Q4_1 and Q8_0 are such blocks. Q4_K has a scale and a minimum per 32 numbers, of 6 bits each times a factor of 256
numbers: multiplied and rounded to float16, they make Q4_1. Numbers of other types are rounded to Q8_0, by at most a
254th of the largest of 32. Source: ggml-common.h, block_q4_K; ggml-quants.c, get_scale_min_k4().
"""

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from engine_worker.gguf.metadata import ConversionError
from engine_worker.gguf.weights import Tensor, values_of

IN_PLACE = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_FLOATS = (
    GGMLQuantizationType.F64, GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16,
)  # fmt: skip
_BLOCK = 32  # numbers
_Q4_K_BYTES, _Q4_K_SCALES, _Q4_K_QUANTS = 144, 4, 16  # of a block, and before its scales and quants


def block_type(tensor: Tensor) -> GGMLQuantizationType | None:
    """Return the type of a tensor's blocks, or None if it stays in 16 or 32 bits."""
    kind = tensor.kind
    if kind in _FLOATS or len(tensor.shape) != 2 or tensor.shape[1] % _BLOCK:
        return None
    if kind in IN_PLACE:
        return kind
    return GGMLQuantizationType.Q4_1 if kind is GGMLQuantizationType.Q4_K else GGMLQuantizationType.Q8_0


def blocks_of(tensor: Tensor, rows: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
    """Return the blocks of some stored_rows() of a tensor with a block_type(), uint8 [rows, bytes].

    `values` are their values_of(), if they are at hand; a type that is rounded needs them.

    Raises:
        ConversionError: If a scale does not fit float16.
    """
    if tensor.kind in IN_PLACE:
        return rows
    if tensor.kind is GGMLQuantizationType.Q4_K:
        return _q4_1_of_q4_k(np.ascontiguousarray(rows), tensor.name)
    exact = values_of(tensor, rows) if values is None else values
    return gguf.quantize(np.ascontiguousarray(exact), GGMLQuantizationType.Q8_0)


def _q4_1_of_q4_k(rows: np.ndarray, name: str) -> np.ndarray:
    blocks = rows.reshape(-1, _Q4_K_BYTES)
    factors = np.ascontiguousarray(blocks[:, :_Q4_K_SCALES]).view(np.float16).astype(np.float32)
    scales, minima, last = np.split(blocks[:, _Q4_K_SCALES:_Q4_K_QUANTS], 3, axis=1)
    scales = np.concatenate((scales & 63, last & 15 | scales >> 6 << 4), axis=1) * factors[:, :1]
    minima = np.concatenate((minima & 63, last >> 4 | minima >> 6 << 4), axis=1) * -factors[:, 1:]
    with np.errstate(over="ignore"):  # checked below
        headers = np.stack((scales, minima), axis=2).astype(np.float16)  # [blocks, 8, 2]
    if not np.isfinite(headers).all():
        raise ConversionError(f"tensor {name}: a scale of type Q4_K does not fit float16")
    # 32 bytes have the numbers of two groups, one in the lower half of each byte, one in the upper half.
    pairs = blocks[:, _Q4_K_QUANTS:].reshape(-1, 4, 1, _BLOCK)
    quants = np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 2, _BLOCK // 2)
    packed = quants[:, :, 0] | quants[:, :, 1] << 4
    made: np.ndarray = np.concatenate((headers.view(np.uint8), packed), axis=2).reshape(len(rows), -1)
    return made
