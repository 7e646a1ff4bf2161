"""Programmatic dependent launch: a kernel may start while the kernel before it on the stream still runs.

    kernel[grid](..., **dependent_launch(x))    and in the kernel:    if DEPENDENT: gdc_launch_dependents(); gdc_wait()

The rule that keeps it safe: a kernel launched so calls gdc_wait() before it reads or writes anything but constants
(weights). The wait ends when the kernel before has finished; as that one has waited too, everything before has. Needs
compute capability 9; neither the interpreter nor older devices have it, so it is a constant of the compilation.

It serves the kernels of a captured step. It knows no kernel.
"""

from functools import cache

import torch
from torch import Tensor


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Arguments of a launch that works on `x`; tensors without memory stand for a Hopper GPU's."""
    is_dependent = x.is_meta or (x.is_cuda and _capability(x.device)[0] >= 9)
    return {"DEPENDENT": is_dependent, "launch_pdl": is_dependent}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
