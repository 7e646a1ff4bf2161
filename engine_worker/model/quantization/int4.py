"""Read 4-bit integers of compressed-tensors, GPTQ and AWQ into one form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.model.weight_format import (
    COLUMNS,
    GPTQ_SCALES,
    GPTQ_VALUES,
    GPTQ_ZEROS,
    INT4_SCALES,
    INT4_VALUES,
    INT4_ZEROS,
    NIBBLES,
    Axes,
    Int4Scheme,
    Packing,
)
from engine_worker.model.weights import WeightSource
from kernels.cpu.linear import GROUP, GroupedWeight, GroupFormat

MIDDLE = 8  # zero point of symmetric weights
_ROUNDED_AT_ONCE = 2**25  # numbers, whose rounding takes 20 bytes each
_SCALE_FACTORS = [0.6 + 0.02 * step for step in range(28)]  # of the scale that reaches the extreme number
# Places of eight numbers in AWQ's int32, lowest bits first: number 1 has the bits 16 to 19.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [N, K]: (values - zeros) * scales.

    Attributes:
        values: [N, K] uint8, 0 to 15.
        zeros: [N, groups] uint8, 0 to 15.
        scales: [N, groups] float32; a group has K / groups columns.
    """

    values: Tensor
    zeros: Tensor
    scales: Tensor

    def exact(self) -> Tensor:
        """Return [N, K] float32, exact but for one rounding."""
        groups = self.values.unflatten(1, (self.scales.shape[1], -1)).to(torch.int8)
        numbers = (groups - self.zeros.to(torch.int8)[..., None]).float()
        exact: Tensor = numbers * self.scales[..., None]
        return exact.flatten(1)


def rounded(weight: Tensor, group: int) -> Int4Weight:
    """Round a weight [N, K] to symmetric groups of `group` inputs with float16 scales.

    The number with the largest magnitude of a group becomes -8, or less where a smaller scale has a smaller squared
    error: a clipped number costs less than coarse steps for all others.

    Raises:
        ValueError: If a scale does not fit float16.
    """
    parts = [_rounded(part, group) for part in weight.split(max(1, _ROUNDED_AT_ONCE // weight.shape[1]))]
    values, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Int4Weight(values, torch.full_like(scales, MIDDLE, dtype=torch.uint8), scales)


def _rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, group))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    scales, values = torch.zeros_like(extreme), torch.zeros_like(groups, dtype=torch.uint8)
    least = torch.full_like(extreme, torch.inf)
    for factor in _SCALE_FACTORS:
        tried = (extreme * (-factor / MIDDLE)).half().float()
        if not tried.isfinite().all():
            raise ValueError("cannot quantize to 4 bits: a weight is NaN, infinite or too large for a float16 scale")
        divisors = tried.masked_fill(tried == 0, 1)[..., None]
        numbers = (groups / divisors).round_().clamp_(-MIDDLE, MIDDLE - 1)
        errors = (numbers * tried[..., None]).sub_(groups).square_().sum(2)
        is_better = errors < least
        least, scales = torch.where(is_better, errors, least), torch.where(is_better, tried, scales)
        values = torch.where(is_better[..., None], (numbers + MIDDLE).to(torch.uint8), values)
    return values.flatten(1), scales


def in_groups(weight: Int4Weight) -> GroupedWeight | None:
    """Return the weight in groups of 32 inputs, or None if a scale has no exact float16.

    Other zero points than 8 become a minimum, zero * scale, which is rounded to float16.
    """
    columns, groups = weight.values.shape[1], weight.scales.shape[1]
    scales = weight.scales.half()
    if not torch.equal(scales.float(), weight.scales):
        return None
    values = weight.values.unflatten(1, (-1, GROUP))
    quants = values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4
    repeats = columns // groups // GROUP
    spread = scales.repeat_interleave(repeats, 1)
    if bool((weight.zeros == MIDDLE).all()):
        return GroupedWeight(GroupFormat.INT4_ZERO_8, quants, spread)
    minima = (weight.zeros.float() * weight.scales).neg_().half().repeat_interleave(repeats, 1)
    return GroupedWeight(GroupFormat.INT4_MINIMUM, quants, spread, minima)


def read_int4(source: WeightSource, module: str, shape: tuple[int, ...], scheme: Int4Scheme) -> Int4Weight:
    """Return a weight of `shape`, [rows, columns]. The bytes that were read count as not kept.

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    forms, axes = scheme.tensors(shape), scheme.axes
    for suffix in forms.keys() - axes.keys():
        source.leave(module + suffix)
    is_awq = scheme.packing is Packing.AWQ

    def read(suffix: str, dtype: torch.dtype) -> Tensor:
        tensor = source.get(module + suffix, forms[suffix].shape, dtype=dtype)
        source.keep_as(tensor.nbytes, 0)
        return tensor

    def integers(suffix: str) -> Tensor:
        return _rows_first(read(suffix, torch.int32), axes[suffix], is_awq=is_awq)

    if scheme.packing is Packing.COMPRESSED_TENSORS:
        values, scales = integers(INT4_VALUES), read(INT4_SCALES, torch.float32)
        zeros = integers(INT4_ZEROS) if scheme.has_zeros else torch.full_like(scales, MIDDLE, dtype=torch.uint8)
        return Int4Weight(values, zeros, scales)
    values, scales, zeros = integers(GPTQ_VALUES), read(GPTQ_SCALES, torch.float32).T.contiguous(), integers(GPTQ_ZEROS)
    return Int4Weight(values, zeros + 1 & 15 if scheme.zeros_less_one else zeros, scales)


def _rows_first(packed: Tensor, axes: Axes, *, is_awq: bool) -> Tensor:
    """Unpack int32 to uint8 and return [rows, columns or groups]."""
    (first, _), (_, unit) = axes
    is_first_packed = unit != NIBBLES
    bytes_ = (packed.T if is_first_packed else packed).contiguous().view(torch.uint8)
    numbers = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)
    if is_awq:
        numbers = numbers.unflatten(-1, (-1, NIBBLES))[..., _AWQ_PLACES].flatten(-2)
    return numbers.T.contiguous() if (first == COLUMNS) != is_first_packed else numbers
