"""The gate of a gated MLP: SwiGLU, or GEGLU with the tanh approximation.

x is [T, 2 * I] with the gate in columns [0, I) and up in [I, 2 * I). The result is computed in float32 and rounded once
to the dtype of x; a quantized result is rounded the same way first. Rows may be strided; columns are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8_quantize import launch_rows, store_quantized_row
from kernels.scaled import Scaled, empty_rows

# 1024 elements for 4 warps: one 16-byte load each of gate and up per thread in bf16.
_BLOCK = 1024


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


@triton.jit
def _gate_and_mul_kernel(
    x, output, x_row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row_stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z, with z = sqrt(2 / pi) * (x + 0.044715 x^3).
    argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    gated = gate / (1.0 + tl.exp(-argument)) * up
    tl.store(output + row * WIDTH + columns, gated.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul_quantized_kernel(
    x, values, scales, x_row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row_stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    exact = (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)
    store_quantized_row(exact, values, scales, row, columns, WIDTH)


def silu_and_mul_quantized(x: Tensor) -> Scaled:
    """Return silu(gate) * up, quantized by rows, [T, I]."""
    double_width = x.shape[1]
    assert double_width % 2 == 0 and x.stride(1) == 1
    rows = empty_rows(x, double_width // 2, is_grouped=False)
    launch_rows(_silu_and_mul_quantized_kernel, x, rows)
    return rows


def silu_and_mul_triton(x: Tensor) -> Tensor:
    return _gated(x, is_gelu=False)


def gelu_tanh_and_mul_triton(x: Tensor) -> Tensor:
    return _gated(x, is_gelu=True)


def _gated(x: Tensor, is_gelu: bool) -> Tensor:
    num_rows, double_width = x.shape
    assert double_width % 2 == 0 and x.stride(1) == 1
    width = double_width // 2
    output = x.new_empty(num_rows, width)
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    _gate_and_mul_kernel[grid](
        x, output, x.stride(0), WIDTH=width, BLOCK=_BLOCK, IS_GELU=is_gelu, num_warps=4, **dependent_launch(x)
    )
    return output


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, I], dtype of x."""
    return silu_and_mul_triton(x) if x.is_cuda else silu_and_mul_reference(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return gelu(gate) * up, [T, I], dtype of x."""
    return gelu_tanh_and_mul_triton(x) if x.is_cuda else gelu_tanh_and_mul_reference(x)
