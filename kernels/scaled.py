"""fp8 matrices with scales, and their exact values, in plain torch.

Scale layouts are those of compressed-tensors' channel and block strategies: one per row, or one per 128 elements of an
activation row and per 128 x 128 block of a weight.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from kernels.fp8_kv import E4M3, E4M3_MAX

GROUP = 128  # elements of K, and weight rows, per scale
TINY = 1e-12  # smallest scale, because 0 / 0 is NaN


class Scaling(StrEnum):
    """How a linear layer's inputs are quantized."""

    NONE = "none"  # not quantized
    ROWS = "rows"
    GROUPS = "groups"  # one scale per 128 elements of a row


@dataclass(frozen=True, slots=True)
class Scaled:
    """An fp8 matrix; element = value * scale.

    Attributes:
        values: [R, K], float8_e4m3fn, contiguous.
        scales: float32. Per row: [R]. Grouped: [K / 128, R] for activations, [R / 128, K / 128] rounded up for weights.
        plain: [R, K], the activations before they were quantized, if a part of the layer reads them.
    """

    values: Tensor
    scales: Tensor
    plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == 2

    def part(self, start: int, stop: int) -> "Scaled":
        """Return rows [start, stop) of activations."""
        scales = self.scales[:, start:stop].contiguous() if self.is_grouped else self.scales[start:stop]
        return Scaled(self.values[start:stop], scales)

    def exact_weight(self) -> Tensor:
        """Return the exact weight, [R, K], float32."""
        if not self.is_grouped:
            return self.values.float() * self.scales[:, None]
        rows, inputs = self.values.shape
        scales = self.scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :inputs]
        return self.values.float() * scales

    def exact_rows(self) -> Tensor:
        """Return the exact activation rows, [R, K], float32."""
        scales = self.scales.T.repeat_interleave(GROUP, 1) if self.is_grouped else self.scales[:, None]
        return self.values.float() * scales


def empty_rows(x: Tensor, width: int, is_grouped: bool, keeps_plain: bool = False) -> Scaled:
    """Allocate uninitialized quantized rows [T, width] for x [T, ...], and plain ones of x's dtype if kept."""
    values = x.new_empty(len(x), width, dtype=E4M3)
    scales = x.new_empty((width // GROUP, len(x)) if is_grouped else (len(x),), dtype=torch.float32)
    return Scaled(values, scales, x.new_empty(len(x), width) if keeps_plain else None)


def plain_rows(x: Tensor | Scaled) -> Tensor:
    """Return rows as they were before they were quantized."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None, "whatever quantized the rows was told to keep them"
    return x.plain


def quantize_rows_reference(x: Tensor) -> Scaled:
    """Quantize x [T, K] with one scale per row."""
    scales = (x.abs().amax(-1).float() / E4M3_MAX).clamp(min=TINY)
    return Scaled((x.float() / scales[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales)


def quantize_groups_reference(x: Tensor) -> Scaled:
    """Quantize x [T, K] with one scale per 128 elements of a row."""
    grouped = quantize_rows_reference(x.reshape(-1, GROUP))
    return Scaled(grouped.values.view(x.shape), grouped.scales.view(len(x), x.shape[1] // GROUP).T.contiguous())
