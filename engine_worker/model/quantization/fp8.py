"""fp8 (e4m3) weights with scales per output, per block of 128 x 128, or per tensor; or quantized from 16 bits on load.

Per-tensor scales are expanded to one per output. CUDA multiplies fp8 directly (fp8_cuda.py); a CPU dequantizes weights
while they load.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Head, Linear, LinearMethod, LinearSpec
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.dequantized import DequantizedMethod, read_fp8
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import BLOCK, Fp8Scheme, ScalePer, WeightFormat
from engine_worker.model.weights import WeightSource, joined
from kernels.scaled import quantize_rows_reference

logger = logging.getLogger("worker")


def method(stored: WeightFormat, device_type: str, is_deterministic: bool) -> LinearMethod:
    """Return the method of a format on a device type."""
    multiplied = dense.method(device_type, is_deterministic)
    if device_type != "cuda" or stored.is_dequantized:
        why = "--quantization none" if stored.is_dequantized else f"{device_type} does not support fp8"
        logger.info("weights: %s: dequantized while loading: %s", stored.name, why)
        return DequantizedMethod(stored, multiplied)
    cuda = import_module("engine_worker.model.quantization.fp8_cuda")  # imports triton
    return Fp8Method(stored, multiplied, partial(cuda.Fp8Linear, is_deterministic=is_deterministic))


class Fp8Method:
    """fp8 linear layers. The head, and layers that the checkpoint leaves in 16 bits, are not quantized."""

    def __init__(self, stored: WeightFormat, multiplied: LinearMethod, linear: Callable[..., Linear]) -> None:
        """Wrap a kernel class, which takes (weight [N, K] e4m3, scales, bias, input_scale, is_gated)."""
        self._format, self._dense, self._linear = stored, DequantizedMethod(stored, multiplied), linear

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        schemes = self._schemes(spec)
        if why := _why_dense(spec, schemes):
            logger.info("%s: dequantized to 16 bits: %s", spec.names[0], why)
        if why or not schemes:
            return self._dense.load(spec, source)
        weight, scale, factor = _quantized(spec, source) if self._format.is_online else _stored(spec, source, schemes)
        weight, scale = _in_order(weight, scale, spec.row_order)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        return self._linear(weight, scale, bias, input_scale=factor, is_gated=spec.role is Role.GATE_UP)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        """Load fp8 experts; all of a layer stay in 16 bits if one of them must."""
        load = load.in_one_format(self._format.scheme_of)
        linears = [linear for pair in load.all_linears for linear in pair]
        reasons = {self._why_dense(linear) for linear in linears}
        if reasons != {None}:
            logger.info("%s: dequantized to 16 bits: %s", load.prefix + load.names.down, max(filter(None, reasons)))
            return self._dense.experts(load, source)
        from engine_worker.model.quantization.experts_cuda import CudaExperts, scaled_weight  # noqa: PLC0415 - triton

        return CudaExperts(load, source, partial(scaled_weight, read=self._read))

    def _why_dense(self, spec: LinearSpec) -> str | None:
        """Return why a layer must be in 16 bits."""
        schemes = self._schemes(spec)
        return (_why_dense(spec, schemes) or None) if schemes else "config.json excludes it"

    def _schemes(self, spec: LinearSpec) -> list[Fp8Scheme]:
        return [found for name in spec.names if isinstance(found := self._format.scheme_of(name), Fp8Scheme)]

    def _read(self, spec: LinearSpec, source: WeightSource) -> tuple[Tensor, Tensor]:
        if self._format.is_online:
            return _quantized(spec, source)[:2]
        return _stored(spec, source, self._schemes(spec))[:2]

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dense.head(weight, name, source)


def _quantized(spec: LinearSpec, source: WeightSource) -> tuple[Tensor, Tensor, None]:
    rows = rows_of(spec, source, "weight", (spec.inputs,))
    made = quantize_rows_reference(rows)
    source.keep_as(rows.nbytes, made.values.nbytes + made.scales.nbytes)
    return made.values, made.scales, None


def _stored(
    spec: LinearSpec, source: WeightSource, schemes: Sequence[Fp8Scheme]
) -> tuple[Tensor, Tensor, float | None]:
    """Return the weights and scales of all parts, and the largest input scale, because they share one input."""
    weights, scales, factors = [], [], []
    for name, size, scheme in zip(spec.names, spec.sizes, schemes, strict=True):
        weight, scale, factor = read_fp8(source, name, (size, spec.inputs), scheme)
        weights.append(weight)
        scales.append(scale.expand(size) if scheme.per is ScalePer.TENSOR else scale)
        factors += [] if factor is None else [factor]
    return joined(weights), torch.cat(scales), max(factors) if len(factors) == len(schemes) else None


def _in_order(weight: Tensor, scale: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Reorder rows. Block scales stay, because _why_dense() ensures that rows stay in their blocks."""
    if order is None:
        return weight, scale.contiguous()
    order = order.to(weight.device)
    return weight.view(torch.uint8)[order].view(weight.dtype), scale if scale.dim() == 2 else scale[order]


def _why_dense(spec: LinearSpec, schemes: Sequence[Fp8Scheme]) -> str:
    """Return why a layer with fp8 weights must be dequantized, or an empty string."""
    blocks = [scheme.per is ScalePer.BLOCK for scheme in schemes]
    if not any(blocks) and len(schemes) in {0, len(spec.names)}:
        return ""
    if len(schemes) < len(spec.names):
        return f"config.json excludes {len(spec.names) - len(schemes)} of its {len(spec.names)} parts"
    if not all(blocks):
        return "only some of its parts have block scales"
    if any(size % BLOCK for size in spec.sizes[:-1]):
        return f"its parts of {', '.join(map(str, spec.sizes))} rows do not start at multiples of {BLOCK}"
    order = spec.row_order
    if order is not None and not torch.equal(order // BLOCK, torch.arange(len(order)) // BLOCK):
        return f"its rows are reordered across blocks of {BLOCK}"
    return ""
