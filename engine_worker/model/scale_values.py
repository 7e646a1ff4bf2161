"""Check the values of fp8 scales in a checkpoint, without torch.

numpy has no bfloat16, so safetensors files are read directly: an 8-byte header length, a JSON header with the offsets
of each tensor, the tensors (version 1 of the format). Scales are at most a thousandth of a checkpoint.
"""

import json
from collections.abc import Iterable
from itertools import groupby

import numpy as np
import numpy.typing as npt

from engine_worker.model.checkpoint import StoredTensor
from shared.model_files import ModelFilesError


def check_scales(scales: Iterable[StoredTensor]) -> None:
    """Check that all scales are finite and not negative.

    Raises:
        ModelFilesError: For the first scale that is not.
    """
    for path, tensors in groupby(sorted(scales, key=lambda tensor: (tensor.path, tensor.name)), key=lambda t: t.path):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for tensor in tensors:
                start, end = header[tensor.name]["data_offsets"]
                file.seek(8 + length + start)
                _check(tensor, _floats(file.read(end - start), tensor.dtype))


def _check(tensor: StoredTensor, values: npt.NDArray[np.floating]) -> None:
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    if len(wrong):
        raise ModelFilesError(
            f"{tensor.name} has {float(wrong[0])} in {tensor.path.name}; fp8 scales must be finite and >= 0"
        )


def _floats(content: bytes, dtype: str) -> npt.NDArray[np.floating]:
    if dtype == "BF16":  # bfloat16 is the upper half of a float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(content, {"F32": "<f4", "F16": "<f2"}[dtype])
