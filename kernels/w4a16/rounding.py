"""Round weights to 4-bit integers in groups, without calibration: the scales have small squared errors."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.moe.weights import MIDDLE

_LARGEST = 15
_AT_ONCE = 2**25  # numbers, whose rounding takes 20 bytes each
# Of the scale that reaches the extreme number of a symmetric group.
_SCALE_FACTORS = [0.6 + 0.02 * step for step in range(28)]
# Steps over the range of a group with a minimum: fewer than 15 reach beyond it, more clip its ends. None is half of an
# integer: numbers that were rounded to 5 bits before would be ties.
_STEPS = [13.1 + 0.25 * step for step in range(15)]
_REFINEMENTS = 2
_NO_SCALE = "cannot quantize to 4 bits: a weight is NaN, infinite or too large for a float16 scale"


def rounded_symmetric(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round a weight to (value - 8) * scale.

    The number with the largest magnitude of a group becomes -8, or less where a smaller scale has a smaller squared
    error: a clipped number costs less than coarse steps for all others.

    Args:
        weight: [N, K].
        group: Inputs per scale.

    Returns:
        The values, [N, K], uint8, and the scales, [N, K / group], float32 with exact float16 numbers.

    Raises:
        ValueError: If a scale does not fit float16.
    """
    values, scales = _by_rows(weight, (_symmetric(groups) for groups in _groups(weight, group)))
    return values, scales


def rounded_with_minimum(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to value * scale + minimum, as kernels/cpu/csrc/round_to_4_bits_avx2.cpp does.

    At first, the smallest and the largest number of a group are at 0 and 15. Then other ranges are tried: numbers are
    rounded, and a least-squares fit to the integers gives a scale and a minimum. The fit with the least squared error
    is kept, and refined in the same way.

    Args:
        weight: [N, K].
        group: Inputs per scale.

    Returns:
        The values, [N, K], uint8, then scales and minima, [N, K / group], float16.

    Raises:
        ValueError: If a scale or minimum does not fit float16.
    """
    values, scales, minima = _by_rows(weight, (_with_minimum(groups) for groups in _groups(weight, group)))
    return values, scales.half(), minima.half()


def _groups(weight: Tensor, group: int) -> Iterable[Tensor]:
    rows = max(1, _AT_ONCE // weight.shape[1])
    return (part.float().unflatten(1, (-1, group)) for part in weight.split(rows))


def _by_rows(weight: Tensor, parts: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    values, *numbers = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not all(each.isfinite().all() for each in numbers):
        raise ValueError(_NO_SCALE)
    return [values.view(weight.shape), *numbers]


def _symmetric(groups: Tensor) -> tuple[Tensor, Tensor]:
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    scales, values = torch.full_like(extreme, torch.nan), torch.zeros_like(groups, dtype=torch.uint8)
    least = torch.full_like(extreme, torch.inf)
    for factor in _SCALE_FACTORS:
        tried = _in_half(extreme * (-factor / MIDDLE))
        numbers = (groups / _divisors(tried)).round_().clamp_(-MIDDLE, MIDDLE - 1)
        errors = (numbers * tried[..., None]).sub_(groups).square_().sum(2)
        is_better = errors < least
        least, scales = torch.where(is_better, errors, least), torch.where(is_better, tried, scales)
        values = torch.where(is_better[..., None], (numbers + MIDDLE).to(torch.uint8), values)
    return values, scales


def _with_minimum(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low = groups.amin(2)
    span = groups.amax(2) - low
    best = _Fit(_in_half(span / _LARGEST), _in_half(low))
    least = best.squared_error(groups)
    for index in range(len(_STEPS) + _REFINEMENTS):
        start = _Fit(span / _STEPS[index], low) if index < len(_STEPS) else best
        fit = _least_squares(groups, start.integers(groups))
        errors = fit.squared_error(groups)
        is_better = errors < least
        least = torch.where(is_better, errors, least)
        best = _Fit(*(torch.where(is_better, new, old) for new, old in zip(fit, best, strict=True)))
    scales = torch.where(least.isfinite(), best.scales, torch.nan)
    return best.integers(groups).to(torch.uint8), scales, best.minima


class _Fit(NamedTuple):
    """Groups as integer * scale + minimum."""

    scales: Tensor
    minima: Tensor

    def integers(self, groups: Tensor) -> Tensor:
        return ((groups - self.minima[..., None]) / _divisors(self.scales)).round_().clamp_(0, _LARGEST)

    def squared_error(self, groups: Tensor) -> Tensor:
        exact = self.integers(groups).mul_(self.scales[..., None]).add_(self.minima[..., None])
        return exact.sub_(groups).square_().sum(2)


def _least_squares(groups: Tensor, integers: Tensor) -> _Fit:
    """Return the scales and minima of least squares for given integers."""
    count, sums, of_integers = groups.shape[2], groups.sum(2), integers.sum(2)
    products, squares = (integers * groups).sum(2), integers.square().sum(2)
    scales = (count * products - sums * of_integers) / (count * squares - of_integers.square())
    return _Fit(_in_half(scales), _in_half((sums - scales * of_integers) / count))


def _in_half(numbers: Tensor) -> Tensor:
    return numbers.half().float()


def _divisors(scales: Tensor) -> Tensor:
    return scales.masked_fill(scales == 0, torch.inf)[..., None]
