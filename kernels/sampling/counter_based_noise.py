"""Stateless random numbers: noise = hash(seed, output index, stage, counter).

The hash is the finalizer of SplitMix64 over 64-bit counters, in int64 arithmetic that wraps identically on every
device. triton_kernels.py has the same functions in Triton. Source: Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_keys(seeds: Tensor, indices: Tensor) -> Tensor:
    """Return [R] int64 keys, one per (seed, output index)."""
    return _mix(_mix(seeds + signed(GOLDEN)) + (indices + 1) * signed(GOLDEN))


def gumbel_noise(keys: Tensor, stage: int, counters: Tensor) -> Tensor:
    """Return standard Gumbel noise, [R, C] float64.

    Args:
        keys: [R], int64, from draw_keys().
        stage: Separates the draws of one key.
        counters: [R, C], int64.
    """
    bits = _mix(_mix(keys ^ stage)[:, None] + counters * signed(GOLDEN))
    # float64 first, because torch promotes int64 + 0.5 to float32. With 52 bits and a half, the smallest and the
    # largest
    # value are strictly inside (0, 1).
    uniform: Tensor = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def signed(value: int) -> int:
    """Return the 64 bits of `value` as a signed int64."""
    return value - 2**64 if value >= 2**63 else value


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift_right(values, 30)) * signed(MULTIPLIERS[0])
    values = (values ^ _shift_right(values, 27)) * signed(MULTIPLIERS[1])
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift logically: torch has no unsigned 64-bit arithmetic, and `>>` copies the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)
