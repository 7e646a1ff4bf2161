"""Keys and values in 8 bits (e4m3): the scales of a layer, and how a cache of them is written.

    KVScales             what a stored key or value is multiplied with to be itself again; 1 and 1 unless told
    to_e4m3(x, scale)    x / scale, rounded to the nearest even, and beyond +-448 to +-448

Numbers become smaller in the cache alone: whatever reads it computes in 16 bits or more, with sums in float32. Plain
torch, for a CPU and for tests; the kernels have the same in Triton (rotary_embedding.py, attention/operands.py). It is
on a block's walk, where it is written and read by a layer. It knows no block and no layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # the largest; there is no infinity (OCP 8-bit floating point specification)


@dataclass(frozen=True, slots=True)
class KVScales:
    key: float = 1.0
    value: float = 1.0


UNIT_SCALES = KVScales()


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """NaN stays NaN."""
    exact = x.to(torch.float32) * (1.0 / scale)
    return exact.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
