"""The 8-bit (e4m3) KV cache: scales of a layer and the conversion to e4m3 in torch.

Only the cache is 8-bit: readers compute in at least 16 bits and sum in float32. The Triton kernels have their own copy
of the conversion (rotary_embedding.py, attention/operands.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # largest e4m3 number; there is no infinity (OCP 8-bit floating point specification)


@dataclass(frozen=True, slots=True)
class KVScales:
    """Factors that turn stored keys and values into their original size."""

    key: float = 1.0
    value: float = 1.0


UNIT_SCALES = KVScales()


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """Return x / scale, rounded to nearest even and clamped to +-448. NaN stays NaN."""
    exact = x.to(torch.float32) * (1.0 / scale)
    return exact.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
