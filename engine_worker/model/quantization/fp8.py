"""Weights in fp8 (e4m3) with scales: for each output, for blocks of 128 x 128 or for a whole tensor, which is the first
kind once it is loaded; or 16 bits that are quantized while they load.

    CUDA    fp8_cuda.py multiplies them as they are
    CPU     they are dequantized while they load: no processor here multiplies them

Knows no layer and no network. It is used at a worker's start, where weights load, and in every step.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from engine_worker.model.linear import Head, Linear, LinearMethod, LinearSpec, Role
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.dequantized import (
    DequantizedWeights,
    read_fp8,
)
from engine_worker.model.weight_format import BLOCK, Fp8Scheme, ScalePer, WeightFormat
from engine_worker.model.weights import WeightSource, joined
from kernels.scaled import quantize_rows_reference

logger = logging.getLogger("worker")


def method(stored: WeightFormat, device_type: str, is_deterministic: bool) -> LinearMethod:
    if device_type != "cuda" or stored.is_dequantized:
        why = "--quantization none" if stored.is_dequantized else f"the {device_type} multiplies no fp8"
        logger.info("weights: %s, dequantized while they load: %s", stored.name, why)
        return DequantizedMethod(stored, dense.method(device_type))
    cuda = import_module("engine_worker.model.quantization.fp8_cuda")  # imports triton
    return Fp8Method(stored, dense.method(device_type), partial(cuda.Fp8Linear, is_deterministic=is_deterministic))


class DequantizedMethod:
    """fp8 weights that are multiplied as 16 or 32 bits."""

    def __init__(self, stored: WeightFormat, multiplied: LinearMethod) -> None:
        self._format, self._dense = stored, multiplied

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        return self._dense.load(spec, DequantizedWeights(source, self._format))

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dense.head(weight, name, source)


class Fp8Method:
    """Products of fp8 weights. What a checkpoint leaves in 16 bits, and the head, is multiplied as that."""

    def __init__(self, stored: WeightFormat, multiplied: LinearMethod, linear: Callable[..., Linear]) -> None:
        """`linear`: made of weight [N, K] e4m3, scales [N] or [N / 128, K / 128], bias, input_scale, is_gated."""
        self._format, self._dense, self._linear = stored, DequantizedMethod(stored, multiplied), linear

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        schemes = [scheme for name in spec.names if (scheme := self._format.scheme_of(name)) is not None]
        if why := _why_dense(spec, schemes):
            logger.info("%s: its weights are multiplied in 16 bits: %s", spec.names[0], why)
        if why or not schemes:
            return self._dense.load(spec, source)
        weight, scale, factor = _quantized(spec, source) if self._format.is_online else _stored(spec, source, schemes)
        weight, scale = _in_order(weight, scale, spec.row_order)
        bias = dense.rows_of(spec, source, "bias", ()) if spec.bias else None
        return self._linear(weight, scale, bias, input_scale=factor, is_gated=spec.role is Role.GATE_UP)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dense.head(weight, name, source)


def _quantized(spec: LinearSpec, source: WeightSource) -> tuple[Tensor, Tensor, None]:
    rows = dense.rows_of(spec, source, "weight", (spec.inputs,))
    made = quantize_rows_reference(rows)
    source.keep_as(rows.nbytes, made.values.nbytes + made.scales.nbytes)
    return made.values, made.scales, None


def _stored(
    spec: LinearSpec, source: WeightSource, schemes: Sequence[Fp8Scheme]
) -> tuple[Tensor, Tensor, float | None]:
    """Weights and scales of all parts of a product, and the largest of their inputs' scales: they have one input."""
    weights, scales, factors = [], [], []
    for name, size, scheme in zip(spec.names, spec.sizes, schemes, strict=True):
        weight, scale, factor = read_fp8(source, name, (size, spec.inputs), scheme)
        weights.append(weight)
        scales.append(scale.expand(size) if scheme.per is ScalePer.TENSOR else scale)
        factors += [] if factor is None else [factor]
    return joined(weights), torch.cat(scales), max(factors) if len(factors) == len(schemes) else None


def _in_order(weight: Tensor, scale: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales of blocks stay where they are: _why_dense() has seen to it that rows stay in their blocks."""
    if order is None:
        return weight, scale.contiguous()
    order = order.to(weight.device)
    return weight.view(torch.uint8)[order].view(weight.dtype), scale if scale.dim() == 2 else scale[order]


def _why_dense(spec: LinearSpec, schemes: Sequence[Fp8Scheme]) -> str:
    """Say why a product that has fp8 weights cannot be one of fp8; empty where it can."""
    blocks = [scheme.per is ScalePer.BLOCK for scheme in schemes]
    if not any(blocks) and len(schemes) in {0, len(spec.names)}:
        return ""
    if len(schemes) < len(spec.names):
        return f"config.json ignores {len(spec.names) - len(schemes)} of its {len(spec.names)} parts"
    if not all(blocks):
        return "some of its parts have a scale for each block, others have not"
    if any(size % BLOCK for size in spec.sizes[:-1]):
        return f"its parts of {', '.join(map(str, spec.sizes))} rows do not begin with blocks of {BLOCK}"
    order = spec.row_order
    if order is not None and not torch.equal(order // BLOCK, torch.arange(len(order)) // BLOCK):
        return f"its rows are put into another order, over blocks of {BLOCK}"
    return ""
