"""What ends a mixer: gates of its outputs, with a norm of each part of a row. The result may be quantized.

A quantized result is first rounded to the dtype of x. It equals quantize_rows() or quantize_groups() (fp8_quantize.py)
of the plain one, with one launch and two passes over memory less: 0.7 us of a layer at one row (H200).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.fp8_quantize import quantize_groups, quantized
from kernels.scaled import GROUP, Scaled, Scaling, empty_rows

_TILE = 2048  # elements of a program, unless it has a whole row
_GATE_TILE = 1024


@triton.jit
def _store(exact, x, out, scales, row, place, part, inside, num_parts, WHOLE: tl.constexpr):
    """Store float32 [PARTS, WIDTH]; with `scales`, quantized by the row if the tile is WHOLE, else by each part."""
    if scales is None:
        tl.store(out + place, exact.to(out.dtype.element_ty), mask=inside)
    else:
        rounded = exact.to(x.dtype.element_ty).to(tl.float32)
        largest = tl.max(tl.abs(rounded), axis=1)
        if WHOLE:
            small, scale = quantized(rounded, tl.max(largest, axis=0))
            tl.store(scales + row, scale)
        else:
            small, scale = quantized(rounded, largest[:, None])
            tl.store(scales + part * tl.num_programs(0) + row, scale, mask=part < num_parts)
        tl.store(out + place, small, mask=inside)


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_norm_kernel(
    x, gate, weight, out, scales, gate_stride, eps,
    NUM_PARTS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr, GATES_FIRST: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run program (row, parts): norm each part of SIZE elements, before or after the gate."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = (tl.program_id(1) * PARTS + tl.arange(0, PARTS))[:, None]
    element = tl.arange(0, WIDTH)[None, :]
    inside = (part < NUM_PARTS) & (element < SIZE)
    column = part * SIZE + element
    place = row * (NUM_PARTS * SIZE) + column
    z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    exact = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if GATES_FIRST:
        exact = exact * z * tl.sigmoid(z)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, 1) / SIZE + eps)[:, None]
    normed *= tl.load(weight + part * WEIGHT_STRIDE + element, mask=inside, other=0.0)
    if not GATES_FIRST:
        normed = normed * z * tl.sigmoid(z)
    _store(normed, x, out, scales, row, place, part, inside, NUM_PARTS, WHOLE)


@triton.jit(do_not_specialize=["gate_stride"])
def _multiply_sigmoid_kernel(
    x, gate, out, scales, gate_stride,
    SIZE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = (tl.program_id(1) * PARTS + tl.arange(0, PARTS))[:, None]
    column = part * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < SIZE
    exact = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gated = exact * tl.sigmoid(z)
    _store(gated, x, out, scales, row, row * SIZE + column, part, inside, tl.cdiv(SIZE, WIDTH), WHOLE)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, scaling: Scaling = Scaling.NONE
) -> Tensor | Scaled:
    """As RecurrentOperators.gated_rms_norm()."""
    return _gated_norm(x, gate, weight, _Norm(len(weight), 0, eps, gates_first=False), scaling)


def rms_norm_of_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, scaling: Scaling = Scaling.NONE
) -> Tensor | Scaled:
    """As RecurrentOperators.rms_norm_of_gated()."""
    size = x.shape[1] // num_groups
    return _gated_norm(x, gate, weight, _Norm(size, size, eps, gates_first=True), scaling)


def multiply_sigmoid(x: Tensor, gate: Tensor, scaling: Scaling = Scaling.NONE) -> Tensor | Scaled:
    """As RecurrentOperators.multiply_sigmoid()."""
    assert x.is_contiguous() and gate.shape == x.shape and gate.stride(1) == 1
    size = x.shape[1]
    width = {Scaling.NONE: _GATE_TILE, Scaling.ROWS: triton.next_power_of_2(size), Scaling.GROUPS: GROUP}[scaling]
    parts = max(1, _GATE_TILE // width)
    out = _empty(x, scaling)
    _multiply_sigmoid_kernel[len(x), triton.cdiv(size, parts * width)](
        x,
        gate,
        *_tensors(out),
        gate.stride(0),
        SIZE=size,
        PARTS=parts,
        WIDTH=width,
        **_of_tile(x, parts * width, scaling),
    )
    return out


@dataclass(frozen=True, slots=True)
class _Norm:
    size: int  # of a part
    weight_stride: int  # of the parts' weights
    eps: float
    gates_first: bool


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, norm: _Norm, scaling: Scaling) -> Tensor | Scaled:
    assert x.is_contiguous() and gate.stride(1) == 1 and weight.is_contiguous()
    if scaling is Scaling.GROUPS and norm.size != GROUP:
        plain = _gated_norm(x, gate, weight, norm, Scaling.NONE)
        assert isinstance(plain, Tensor)
        return quantize_groups(plain)
    num_parts, width = x.shape[1] // norm.size, triton.next_power_of_2(norm.size)
    parts = triton.next_power_of_2(num_parts) if scaling is Scaling.ROWS else max(1, _TILE // width)
    out = _empty(x, scaling)
    _gated_norm_kernel[len(x), triton.cdiv(num_parts, parts)](
        x, gate, weight, *_tensors(out), gate.stride(0), norm.eps, NUM_PARTS=num_parts, SIZE=norm.size, PARTS=parts,
        WIDTH=width, WEIGHT_STRIDE=norm.weight_stride, GATES_FIRST=norm.gates_first,
        **_of_tile(x, parts * width, scaling),
    )  # fmt: skip
    return out


def _empty(x: Tensor, scaling: Scaling) -> Tensor | Scaled:
    return torch.empty_like(x) if scaling is Scaling.NONE else empty_rows(x, x.shape[1], scaling is Scaling.GROUPS)


def _tensors(out: Tensor | Scaled) -> tuple[Tensor, Tensor | None]:
    return (out.values, out.scales) if isinstance(out, Scaled) else (out, None)


def _of_tile(x: Tensor, elements: int, scaling: Scaling) -> dict[str, Any]:
    """Return the launch arguments of programs with so many elements: 16 per thread, up to 16 warps."""
    return {
        "WHOLE": scaling is Scaling.ROWS, "num_warps": max(1, min(16, elements // 512)), **dependent_launch(x)
    }  # fmt: skip
