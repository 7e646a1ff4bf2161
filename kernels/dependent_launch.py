"""Programmatic dependent launch: a kernel may start while the previous kernel on the stream still runs.

    kernel[grid](..., **dependent_launch(x))    and in the kernel:    if DEPENDENT: gdc_launch_dependents(); gdc_wait()

A kernel launched this way must call gdc_wait() before it reads or writes anything except constants (weights). The wait
ends when the previous kernel has finished. That kernel has waited too, so all earlier kernels have also finished.
"""

from functools import cache

import torch
from torch import Tensor


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Return the launch arguments for `x`. A meta tensor stands for one on a Hopper GPU.

    The feature needs compute capability 9, and the interpreter lacks it, so DEPENDENT is a compile-time constant.
    """
    is_dependent = x.is_meta or (x.is_cuda and _capability(x.device)[0] >= 9)
    return {"DEPENDENT": is_dependent, "launch_pdl": is_dependent}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
