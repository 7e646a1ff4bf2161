"""The scales of fp8 weights as a checkpoint has them: whether they are factors. Read before torch is there.

They are a thousandth of a checkpoint or less. Knows a safetensors file's layout, because numpy has no bfloat16: 8 bytes
with the length of a header, the header in JSON with where each tensor lies, the tensors (version 1 of the format). It
is used by the checks before a worker's start.
"""

import json
from collections.abc import Iterable
from itertools import groupby

import numpy as np
import numpy.typing as npt

from engine_worker.model.checkpoint import StoredTensor
from shared.model_files import ModelFilesError


def check_scales(scales: Iterable[StoredTensor]) -> None:
    """Raises ModelFilesError for the first one that is not finite, or negative."""
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
            f"{tensor.name} has {float(wrong[0])} in {tensor.path.name}; scales of fp8 are finite and not negative"
        )


def _floats(content: bytes, dtype: str) -> npt.NDArray[np.floating]:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(content, {"F32": "<f4", "F16": "<f2"}[dtype])
