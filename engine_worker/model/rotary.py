"""Rotary tables for every RopeSpec, in the only form that kernels rotate: element i of a head with element i + D / 2.

If a family pairs other elements or rotates a part of a head, the rows of query and key weights are reordered on load.
Scores are sums over elements, so the same order on both sides changes nothing. Unrotated elements have the angle 0.
Kernels therefore need no partial, interleaved or absent rotation.
"""

import math

import torch
from torch import Tensor

from engine_worker.model.specs.attention import RopeScaling, RopeSpec


def rotary_table(rope: RopeSpec, head_dim: int, max_len: int) -> Tensor:
    """Return [max_len, D] float32: D / 2 cosines, then D / 2 sines, per position."""
    frequencies = _frequencies(rope)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    factor = rope.scaling.attention_factor if rope.scaling else 1.0
    num_still = (head_dim - rope.dim) // 2
    cos = torch.cat((angles.cos() * factor, torch.ones(max_len, num_still)), dim=-1)
    sin = torch.cat((angles.sin() * factor, torch.zeros(max_len, num_still)), dim=-1)
    return torch.cat((cos, sin), dim=-1)


def query_scales(rope: RopeSpec, max_len: int) -> Tensor | None:
    """Return the factors of rotated queries by position, [max_len] float32, or None."""
    if rope.query_scale is None:
        return None
    spans = torch.arange(max_len) // rope.query_scale.original_max_position_embeddings
    return 1 + rope.query_scale.beta * torch.log(1 + spans.float())


def rotary_order(rope: RopeSpec, head_dim: int) -> Tensor | None:
    """Return the checkpoint's element at each position of a head, int64 [D]; None: unchanged."""
    rotated, still = torch.arange(rope.dim), torch.arange(rope.dim, head_dim)
    pairs = rotated.view(-1, 2).T if rope.interleaved else rotated.view(2, -1)
    first, second = pairs
    half = len(still) // 2
    order = torch.cat((first, still[:half], second, still[half:]))
    return None if torch.equal(order, torch.arange(head_dim)) else order


def _frequencies(rope: RopeSpec) -> Tensor:
    """Return [dim / 2] float32 frequencies, in radians per position."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / max(1, rope.dim)
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling is None:
        return frequencies
    return _STRETCHED[rope.scaling.kind](frequencies, rope.scaling, rope)


def _linear(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    return frequencies / scaling.factor


def _by_wavelength(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    """Scale the frequencies by wavelength.

    Wavelengths short against the original context are kept, longer ones are divided by `factor`, and frequencies
    between the two bounds are interpolated linearly.
    """
    turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, rope: RopeSpec) -> Tensor:
    """Scale the frequencies with YaRN (arXiv 2309.00071, section 3.2); `truncate` rounds the bounds."""

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
    """Divide each frequency by its factor (LongRoPE, arXiv 2402.13753)."""
    if len(scaling.factors) != len(frequencies):
        raise ValueError(f"config.json: longrope has {len(scaling.factors)} factors for {len(frequencies)} frequencies")
    return frequencies / torch.tensor(scaling.factors)


_STRETCHED = {"linear": _linear, "by_wavelength": _by_wavelength, "yarn": _yarn, "longrope": _longrope}
