"""Rotary tables for every RopeSpec, in the one form that kernels turn: element i of a head with element i + D / 2.

    rotary_table(rope, head_dim, max_len)   [max_len, D] float32: D / 2 cosines, then D / 2 sines, of each position
    rotary_order(rope, head_dim)            which element of the checkpoint's head stands at each place, or None

Where a family pairs other elements, or rotates a part of a head, the rows of the query and key weights are put into
another order when they are loaded: scores are sums over elements, so the same order on both sides changes nothing. What
is not rotated turns by no angle. So no kernel knows of partial, interleaved or absent rotation. It is used once, at a
worker's start: the steps look into the table.
"""

import math

import torch
from torch import Tensor

from engine_worker.model.spec import RopeScaling, RopeSpec


def rotary_table(rope: RopeSpec, head_dim: int, max_len: int) -> Tensor:
    frequencies = _frequencies(rope)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    factor = rope.scaling.attention_factor if rope.scaling else 1.0
    num_still = (head_dim - rope.dim) // 2
    cos = torch.cat((angles.cos() * factor, torch.ones(max_len, num_still)), dim=-1)
    sin = torch.cat((angles.sin() * factor, torch.zeros(max_len, num_still)), dim=-1)
    return torch.cat((cos, sin), dim=-1)


def rotary_order(rope: RopeSpec, head_dim: int) -> Tensor | None:
    """int64 [D], or None where the checkpoint's own order is that of the kernels."""
    rotated, still = torch.arange(rope.dim), torch.arange(rope.dim, head_dim)
    pairs = rotated.view(-1, 2).T if rope.interleaved else rotated.view(2, -1)
    first, second = pairs
    half = len(still) // 2
    order = torch.cat((first, still[:half], second, still[half:]))
    return None if torch.equal(order, torch.arange(head_dim)) else order


def _frequencies(rope: RopeSpec) -> Tensor:
    """[dim / 2] float32, radians a position."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / max(1, rope.dim)
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is None:
        return frequencies
    return _STRETCHED[rope.scaling.kind](frequencies, rope.scaling, rope)


def _linear(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    return frequencies / scaling.factor


def _by_wavelength(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    """Wavelengths that fit often into the original context stay, those longer than it are stretched by `factor`, and
    between the two bounds the frequency goes linearly from one to the other."""
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2), with the bounds rounded to whole dimensions where `truncate`."""

    def dimension_of(turns: float) -> float:
        return (
            rope.dim
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _longrope(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency."""
    if len(scaling.factors) != len(frequencies):
        raise ValueError(f"config.json: longrope has {len(scaling.factors)} factors for {len(frequencies)} frequencies")
    return frequencies / torch.tensor(scaling.factors)


_STRETCHED = {"linear": _linear, "by_wavelength": _by_wavelength, "yarn": _yarn, "longrope": _longrope}
