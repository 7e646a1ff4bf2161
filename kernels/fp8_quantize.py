"""Rows of activations as 8-bit floats with scales.

    quantize_rows(x)      x [T, K]  -> Scaled: values [T, K] float8_e4m3fn, scales [T] float32
    quantize_groups(x)    x [T, K]  -> Scaled: values [T, K] float8_e4m3fn, scales [K / 128, T] float32

A scale is the largest magnitude of what it scales / 448, the largest float8_e4m3fn; where all is 0 it is tiny, and the
values are 0. Values are divided by it in float32 and rounded to nearest even, so none is beyond 448. A row's values
depend on the row alone. Rows may be strided, columns are contiguous. Knows no product. It is used in every step, before
a product of 8 bits.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from kernels.dependent_launch import dependent_launch
from kernels.scaled import GROUP, Scaled, empty_rows

_GROUPS = 8  # a program of quantize_groups: 1,024 elements for 4 warps are one 16-byte load a thread in bf16


@triton.jit
def quantized(values, largest):
    """`values` float32 as 8-bit floats, and their scale; `largest` is of their magnitudes and has their shape but 1."""
    scale = tl.maximum(largest / 448.0, 1e-12)
    return tl.clamp(values / scale, -448.0, 448.0).to(tl.float8e4nv), scale


@triton.jit
def store_quantized_row(exact, values, scales, row, columns, WIDTH: tl.constexpr):
    """`exact` float32 of one row, 0 in `columns` from WIDTH on, which are not stored."""
    small, scale = quantized(exact, tl.max(tl.abs(exact), axis=0))
    tl.store(values + row * WIDTH + columns, small, mask=columns < WIDTH)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_rows_kernel(
    x, values, scales, x_row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exact = tl.load(x + row * x_row_stride + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    store_quantized_row(exact, values, scales, row, columns, WIDTH)


@triton.jit
def _quantize_groups_kernel(
    x, values, scales, x_row_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = columns < WIDTH
    exact = tl.load(x + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    small, scale = quantized(exact, tl.max(tl.abs(exact), axis=1)[:, None])
    tl.store(values + row * WIDTH + columns, small, mask=inside)
    places = groups[:, None] * tl.num_programs(0) + row
    tl.store(scales + places, scale, mask=groups[:, None] * 128 < WIDTH)


def quantize_rows(x: Tensor) -> Scaled:
    num_rows, width = x.shape
    assert x.stride(1) == 1
    rows = empty_rows(x, width, is_grouped=False)
    if num_rows:
        launch_rows(_quantize_rows_kernel, x, rows)
    return rows


def launch_rows(kernel: JITFunction[Any], x: Tensor, rows: Scaled) -> None:
    """A program for each of `rows`, whose whole width it has in registers."""
    num_rows, width = rows.values.shape
    block = triton.next_power_of_2(width)
    warps = min(32, max(1, block // 256))
    kernel[(num_rows,)](
        x, rows.values, rows.scales, x.stride(0), WIDTH=width, BLOCK=block, num_warps=warps, **dependent_launch(x)
    )


def quantize_groups(x: Tensor) -> Scaled:
    num_rows, width = x.shape
    assert x.stride(1) == 1 and width % GROUP == 0
    rows = empty_rows(x, width, is_grouped=True)
    if num_rows:
        grid = (num_rows, triton.cdiv(width // GROUP, _GROUPS))
        _quantize_groups_kernel[grid](
            x, rows.values, rows.scales, x.stride(0), WIDTH=width, GROUPS=_GROUPS, num_warps=4, **dependent_launch(x)
        )
    return rows
