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
from kernels.moe.weights import MIDDLE

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
