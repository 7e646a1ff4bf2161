"""RMSNorm over the last dimension, alone or fused with the preceding residual addition.

normed = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once to the dtype of x. The sum x + residual is rounded
to that dtype before the norm, so add_rms_norm(x, r) equals rms_norm(x + r) bit for bit. Rows may be strided; the last
dimension is contiguous. Inputs are not modified.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8_quantize import quantized
from kernels.scaled import GROUP, Scaled, empty_rows


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(normed.dtype)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # Unfused, this writes and rereads x + residual; the kernel keeps the row in registers.
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps), new_residual


@triton.jit
def store_normed_row(
    values, weight_row, normed, scales, plain, row, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Norm and store one row; `values` and `weight_row` are float32 and 0 from HIDDEN on.

    GROUP is the number of elements per scale if `normed` is quantized, else 0; then `plain` may take the norm itself.
    DTYPE is the dtype of the norm.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    inverse_rms = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    scaled = values * inverse_rms * weight_row
    if GROUP:
        # Rounded as if it had been stored, so the bits equal those of a norm followed by a quantization.
        rounded = scaled.to(DTYPE)
        exact = rounded.to(tl.float32).reshape(BLOCK // GROUP, GROUP)
        small, scale_of = quantized(exact, tl.max(tl.abs(exact), axis=1)[:, None])
        groups = tl.arange(0, BLOCK // GROUP)[:, None]
        tl.store(scales + groups * tl.num_programs(0) + row, scale_of, mask=groups * GROUP < HIDDEN)
        tl.store(normed + row * HIDDEN + columns, small.reshape(BLOCK), mask=inside)
        if plain is not None:
            tl.store(plain + row * HIDDEN + columns, rounded, mask=inside)
    else:
        tl.store(normed + row * HIDDEN + columns, scaled.to(DTYPE), mask=inside)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, normed, new_residual, scales, plain, x_row_stride, residual_row_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    # One program per row: a row's result cannot depend on the number of rows in the batch.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    if DEPENDENT:
        gdc_launch_dependents()
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    values = tl.load(x + row * x_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(new_residual.dtype.element_ty)
        tl.store(new_residual + row * HIDDEN + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    DTYPE: tl.constexpr = new_residual.dtype.element_ty
    store_normed_row(values, scale, normed, scales, plain, row, eps, HIDDEN, BLOCK, GROUP, DTYPE)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, eps, normed, normed)
    return normed


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, new_residual = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, eps, normed, new_residual)
    return normed, new_residual


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool, keeps_plain: bool = False
) -> tuple[Scaled, Tensor]:
    """Add, norm and quantize by rows, or by groups of 128 elements if `is_grouped`.

    Equals quantize_rows() or quantize_groups() of the norm in the dtype of x (fp8_quantize.py), bit for bit.

    Args:
        x: [T, H].
        residual: [T, H].
        weight: [H].
        eps: Added to the mean square.
        is_grouped: One scale per 128 elements instead of one per row.
        keeps_plain: Return the norm as it was before it was quantized, too.

    Returns:
        (normed [T, H], x + residual [T, H]).
    """
    hidden = x.shape[1]
    assert not is_grouped or hidden % GROUP == 0
    new_residual = x.new_empty(x.shape)
    normed = empty_rows(x, hidden, is_grouped, keeps_plain)
    group = GROUP if is_grouped else triton.next_power_of_2(hidden)
    _launch(x, residual, weight, eps, normed.values, new_residual, normed, group)
    return normed, new_residual


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, new_residual: Tensor,
    rows: Scaled | None = None, group: int = 0,
) -> None:  # fmt: skip
    num_rows, hidden = x.shape
    assert x.stride(1) == 1 and weight.shape == (hidden,) and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    summand = x if residual is None else residual
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_rows,)](
        x,
        summand,
        weight,
        normed,
        new_residual,
        None if rows is None else rows.scales,
        None if rows is None else rows.plain,
        x.stride(0),
        summand.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        GROUP=group,
        # 8 elements per thread are one 16-byte load in bf16; more than 16 warps only make the reduction slower.
        num_warps=min(16, max(1, block // 256)),
        **dependent_launch(x),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [T, H] with weight [H], [T, H]."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of x + residual [T, H], x + residual [T, H])."""
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)
