"""Matrices of 8-bit floats with scales, and what they are exactly: no kernel, no device.

    Scaled(values, scales)    values [R, K] float8_e4m3fn, contiguous; element = value * scale, scales float32
        rows of x          scales [R]: one a row       or [K / 128, R]: one for each 128 elements of a row
        weights            scales [R]: one a row       or [R / 128, K / 128], rounded up: one a block of 128 x 128

    empty_rows(x, K, is_grouped)                                [T, K] for the T rows of x, not yet written
    quantize_rows_reference(x), quantize_groups_reference(x)    x [T, K] -> rows, as the kernels of fp8_quantize.py do

The two layouts of scales are those of compressed-tensors' channel and block strategies. It knows no product.

Weights are so from the load on; rows become so within the forward pass, beside the walks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_kv import E4M3, E4M3_MAX

GROUP = 128  # elements of K, and rows of a weight, that share a scale
TINY = 1e-12  # the least scale: 0 / 0 is not a number


@dataclass(frozen=True, slots=True)
class Scaled:
    values: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == 2

    def part(self, start: int, stop: int) -> "Scaled":
        """Some of the rows of x."""
        scales = self.scales[:, start:stop].contiguous() if self.is_grouped else self.scales[start:stop]
        return Scaled(self.values[start:stop], scales)

    def exact_weight(self) -> Tensor:
        """[R, K] float32"""
        if not self.is_grouped:
            return self.values.float() * self.scales[:, None]
        rows, inputs = self.values.shape
        scales = self.scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :inputs]
        return self.values.float() * scales

    def exact_rows(self) -> Tensor:
        """[R, K] float32"""
        scales = self.scales.T.repeat_interleave(GROUP, 1) if self.is_grouped else self.scales[:, None]
        return self.values.float() * scales


def empty_rows(x: Tensor, width: int, is_grouped: bool) -> Scaled:
    values = x.new_empty(len(x), width, dtype=E4M3)
    scales = x.new_empty((width // GROUP, len(x)) if is_grouped else (len(x),), dtype=torch.float32)
    return Scaled(values, scales)


def quantize_rows_reference(x: Tensor) -> Scaled:
    scales = (x.abs().amax(-1).float() / E4M3_MAX).clamp(min=TINY)
    return Scaled((x.float() / scales[:, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales)


def quantize_groups_reference(x: Tensor) -> Scaled:
    grouped = quantize_rows_reference(x.reshape(-1, GROUP))
    return Scaled(grouped.values.view(x.shape), grouped.scales.view(len(x), -1).T.contiguous())
