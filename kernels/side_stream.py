"""Two independent pieces of work whose kernels a CUDA graph runs side by side.

Kernels of a few rows do not fill a GPU, and each takes time to start and end, so the shorter piece costs little.
Outside of a capture, the launches of few rows take longer than their kernels, and many rows fill the GPU: there the
pieces run one after the other.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def side_by_side(first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> list[Tensor]:
    """Return the results of both; neither may write what the other one uses."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [first(), second()]
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        beside = second()
    results = [first(), beside]
    main.wait_stream(side)
    return results


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
