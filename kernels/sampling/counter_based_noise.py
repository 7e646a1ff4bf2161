"""Random numbers without state: noise = hash(seed, output index, stage, counter).

    draw_keys(seeds [R], indices [R])        -> keys [R]: 64 bits for output `index` of the stream `seed`
    gumbel_noise(keys [R], stage, counters)  -> [R, C] float64, standard Gumbel

The hash is SplitMix64's finaliser over 64-bit counters, in integers (int64) that wrap alike on every device; the Triton
twin of these functions is in triton_kernels.py. Knows nothing of logits. It is used at the first step of a token's way
back.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_keys(seeds: Tensor, indices: Tensor) -> Tensor:
    return _mix(_mix(seeds + signed(GOLDEN)) + (indices + 1) * signed(GOLDEN))


def gumbel_noise(keys: Tensor, stage: int, counters: Tensor) -> Tensor:
    """`counters` [R, C] (int64); `stage` parts the draws of one key."""
    bits = _mix(_mix(keys ^ stage)[:, None] + counters * signed(GOLDEN))
    # float64 before the half: torch promotes int64 + 0.5 to float32. With 52 bits and a half, both the least and the
    # greatest value are strictly inside (0, 1).
    uniform: Tensor = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def signed(value: int) -> int:
    """The 64 bits of `value` as int64 has them."""
    return value - 2**64 if value >= 2**63 else value


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift_right(values, 30)) * signed(MULTIPLIERS[0])
    values = (values ^ _shift_right(values, 27)) * signed(MULTIPLIERS[1])
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has no unsigned 64-bit arithmetic, and `>>` copies the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)
