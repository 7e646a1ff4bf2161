"""Random numbers without state: noise = hash(seed, output index, stage, token id).

The hash is SplitMix64's finaliser over 64-bit counters, in integers that wrap alike on every device. Knows nothing of
logits.
"""

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_key(seed: int, index: int) -> int:
    """64 bits for output `index` of the stream `seed`."""
    return _mix(_mix((seed + _GOLDEN) & _MASK) + (index + 1) * _GOLDEN & _MASK)


def gumbel_noise(keys: list[int], stage: int, counters: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for `counters` [len(keys), C] (int64); `stage` parts the draws of one key."""
    stage_keys = [_signed(_mix((key ^ stage) & _MASK)) for key in keys]
    bits = torch.tensor(stage_keys, device=counters.device)[:, None] + counters * _signed(_GOLDEN)
    # float64 before the half: torch promotes int64 + 0.5 to float32. With 52 bits and a half, both the least and the
    # greatest value are strictly inside (0, 1).
    uniform: Tensor = (_shift_right(_mix_tensor(bits), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MULTIPLIERS[0] & _MASK
    value = (value ^ (value >> 27)) * _MULTIPLIERS[1] & _MASK
    return value ^ (value >> 31)


def _mix_tensor(values: Tensor) -> Tensor:
    values = (values ^ _shift_right(values, 30)) * _signed(_MULTIPLIERS[0])
    values = (values ^ _shift_right(values, 27)) * _signed(_MULTIPLIERS[1])
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has no unsigned 64-bit arithmetic, and `>>` copies the sign bit."""
    return torch.bitwise_and(values >> bits, 2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
