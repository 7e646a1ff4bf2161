"""Pieces of a batch: where logits must be copied, ROWS_AT_ONCE rows are sampled at a time, so that a copy stays small.

All 1,024 rows of 151,936 tokens take 593 MiB in float32, and log-probabilities need several such tensors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROWS_AT_ONCE = 128


def piece_bounds(rows: "NDArray[Any] | Sequence[int]") -> dict[int, tuple[int, int]]:
    """Return the slice of `rows` (ascending rows of a batch) in each piece, by the piece's number."""
    if not len(rows):
        return {}
    numbers, firsts = np.unique(np.asarray(rows) // ROWS_AT_ONCE, return_index=True)
    ends = [*firsts[1:].tolist(), len(rows)]
    return dict(zip(numbers.tolist(), zip(firsts.tolist(), ends, strict=True), strict=True))


def to_device(values: "NDArray[Any]", device: torch.device) -> Tensor:
    """Copy to the device without a wait, through pinned memory; a copy from other memory would wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
