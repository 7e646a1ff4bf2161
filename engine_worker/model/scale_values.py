"""Check the values of scales, and of GPTQ's order of inputs, in a checkpoint, without torch.

numpy has no bfloat16, so safetensors files are read directly: an 8-byte header length, a JSON header with the offsets
of each tensor, the tensors (version 1 of the format). These are at most a thirtieth of a checkpoint.
"""

import json
from collections.abc import Iterable, Iterator
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
    for tensor, content in _contents(scales):
        _check(tensor, _floats(content, tensor.dtype))


def check_group_order(indices: Iterable[StoredTensor], group: int) -> None:
    """Check that the inputs of each group of `group` inputs are adjacent; 0: all inputs are one group.

    Args:
        indices: GPTQ's `g_idx`, [K] int32: the group of each input.
        group: Inputs per group.

    Raises:
        ModelFilesError: For the first weight whose inputs are reordered.
    """
    for tensor, content in _contents(indices):
        found = np.frombuffer(content, "<i4")
        if not np.array_equal(found, np.arange(len(found)) // (group or max(1, len(found)))):
            raise ModelFilesError(
                f"{tensor.name}: inputs are reordered between groups (desc_act, act-order), which is not supported; "
                "supported: a checkpoint made with desc_act false"
            )


def _contents(tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, bytes]]:
    ordered = sorted(tensors, key=lambda tensor: (tensor.path, tensor.name))
    for path, of_file in groupby(ordered, key=lambda tensor: tensor.path):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for tensor in of_file:
                start, end = header[tensor.name]["data_offsets"]
                file.seek(8 + length + start)
                yield tensor, file.read(end - start)


def _check(tensor: StoredTensor, values: npt.NDArray[np.floating]) -> None:
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    if len(wrong):
        raise ModelFilesError(
            f"{tensor.name} has {float(wrong[0])} in {tensor.path.name}; scales must be finite and >= 0"
        )


def _floats(content: bytes, dtype: str) -> npt.NDArray[np.floating]:
    if dtype == "BF16":  # bfloat16 is the upper half of a float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(content, {"F32": "<f4", "F16": "<f2"}[dtype])
