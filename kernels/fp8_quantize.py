"""Quantize activation rows to fp8 with scales.

A scale is the largest magnitude of its elements divided by 448, the largest float8_e4m3fn; if all are 0 it is tiny and
the values are 0. Values are divided in float32 and rounded to nearest even, so none exceeds 448. A row's values depend
only on the row. Rows may be strided; columns are contiguous.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction

from kernels.dependent_launch import dependent_launch
from kernels.scaled import GROUP, Scaled, empty_rows

_GROUPS = 8  # per program of quantize_groups: 1,024 elements for 4 warps, one 16-byte load per thread in bf16


@triton.jit
def quantized(values, largest):
    """Return float32 `values` as fp8 and their scale; `largest` broadcasts against `values`."""
    scale = tl.maximum(largest / 448.0, 1e-12)
    return tl.clamp(values / scale, -448.0, 448.0).to(tl.float8e4nv), scale


@triton.jit
def store_quantized_row(exact, values, scales, row, columns, WIDTH: tl.constexpr):
    """Quantize and store one float32 row; `exact` is 0 in `columns` from WIDTH on, which are not stored."""
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
    """Quantize x [T, K] with one scale per row: values [T, K], scales [T]."""
    num_rows, width = x.shape
    assert x.stride(1) == 1
    rows = empty_rows(x, width, is_grouped=False)
    if num_rows:
        launch_rows(_quantize_rows_kernel, x, rows)
    return rows


def launch_rows(kernel: JITFunction[Any], x: Tensor, rows: Scaled) -> None:
    """Launch a kernel with one program per row, which holds the whole row in registers."""
    num_rows, width = rows.values.shape
    block = triton.next_power_of_2(width)
    warps = min(32, max(1, block // 256))
    kernel[(num_rows,)](
        x, rows.values, rows.scales, x.stride(0), WIDTH=width, BLOCK=block, num_warps=warps, **dependent_launch(x)
    )


def quantize_groups(x: Tensor) -> Scaled:
    """Quantize x [T, K] with one scale per 128 elements: values [T, K], scales [K / 128, T]."""
    num_rows, width = x.shape
    assert x.stride(1) == 1 and width % GROUP == 0
    rows = empty_rows(x, width, is_grouped=True)
    if num_rows:
        grid = (num_rows, triton.cdiv(width // GROUP, _GROUPS))
        _quantize_groups_kernel[grid](
            x, rows.values, rows.scales, x.stride(0), WIDTH=width, GROUPS=_GROUPS, num_warps=4, **dependent_launch(x)
        )
    return rows
