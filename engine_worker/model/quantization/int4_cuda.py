"""4-bit integers on Hopper GPUs: kernels/moe for experts, and kernels/w4a16 for few rows of other layers.

With more rows the library multiplies dequantized weights. A layer that the kernels do not know is dequantized to
16 bits while it loads.
"""

import logging
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import (
    NOTHING_QUANTIZED,
    Experts,
    ExpertsLoad,
    Head,
    Input,
    Linear,
    LinearMethod,
    LinearSpec,
)
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.dequantized import DequantizedMethod
from engine_worker.model.quantization.experts_cuda import CudaExperts
from engine_worker.model.quantization.int4 import Int4Weight, read_int4
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.mlp import GateKind, GateSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import Int4Scheme, Scheme, WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.moe.list_product import is_hopper
from kernels.moe.weights import MIDDLE, Int4Experts, pack_int4
from kernels.scaled import Scaling
from kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.few_rows import MAX_ROWS, exact_rows, w4_linear
from kernels.w4a16.one_row import serves_one_row, w4_one_row
from kernels.w4a16.rounding import rounded_symmetric, rounded_with_minimum
from kernels.w4a16.weights import GROUPS, W4Weight, pack_w4, why_not_packed

logger = logging.getLogger("worker")


def method(stored: WeightFormat, is_deterministic: bool) -> LinearMethod:
    """Return the method of a format."""
    multiplied: LinearMethod = dense.method("cuda", is_deterministic)
    if not stored.is_online:
        multiplied = DequantizedMethod(stored, multiplied)
    return Int4Method(stored, multiplied, is_deterministic)


class Int4Method:
    """Linear layers of 4-bit integers. The head, and what the checkpoint has in 16 bits, is not quantized."""

    def __init__(self, stored: WeightFormat, dequantized: LinearMethod, is_deterministic: bool) -> None:
        self._format, self._dequantized, self._is_deterministic = stored, dequantized, is_deterministic

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        schemes = [scheme for name in spec.names if isinstance(scheme := self._format.scheme_of(name), Int4Scheme)]
        if not schemes:
            return self._dequantized.load(spec, source)
        if why := why_no_kernels(source) or self._why_dequantized(spec, schemes):
            log_16_bits(spec.role, why)
            return self._dequantized.load(spec, source)
        weight = self._packed(spec, schemes, source)
        source.keep_as(0, weight.nbytes)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        return W4Linear(weight, bias, is_deterministic=self._is_deterministic)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        load = load.in_one_format(self._format.scheme_of)
        linears = [linear for pair in load.all_linears for linear in pair]
        schemes = [self._format.scheme_of(name) for linear in linears for name in linear.names]
        first = schemes[0]
        if not isinstance(first, Int4Scheme):
            return self._dequantized.experts(load, source)
        if why := why_no_kernels(source) or self._why_no_experts(linears, schemes, first):
            log_16_bits("experts", why)
            return self._dequantized.experts(load, source)

        def read(of_experts: list[LinearSpec], weights: WeightSource) -> Int4Experts:
            each = [self._numbers(linear, [first] * len(linear.names), weights) for linear in of_experts]
            return int4_experts(each, weights)

        return CudaExperts(load, source, read)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dequantized.head(weight, name, source)

    def _packed(self, spec: LinearSpec, schemes: list[Int4Scheme], source: WeightSource) -> W4Weight:
        is_gated = spec.role is Role.GATE_UP
        if self._format.is_online and schemes[0].has_minimum(spec.inputs):
            values, scales, minima = rounded_with_minimum(
                _rows(spec, source), schemes[0].group_that_divides(spec.inputs)
            )
            return pack_w4(values, scales, minima=minima, is_gated=is_gated)
        numbers = self._numbers(spec, schemes, source)
        scales = _narrow(numbers.scales)
        zeros = None if bool((numbers.zeros == MIDDLE).all()) else numbers.zeros
        return pack_w4(numbers.values, scales if scales.itemsize == 2 else scales.bfloat16(), zeros, is_gated=is_gated)

    def _numbers(self, spec: LinearSpec, schemes: list[Int4Scheme], source: WeightSource) -> Int4Weight:
        """Return the numbers of a layer in groups of the kernels: those of the checkpoint, or symmetric ones."""
        if not self._format.is_online:
            return stored_numbers(spec, schemes, source)
        values, scales = rounded_symmetric(_rows(spec, source), schemes[0].group_that_divides(spec.inputs))
        return Int4Weight(values, torch.full_like(scales, MIDDLE, dtype=torch.uint8), scales)

    def _why_dequantized(self, spec: LinearSpec, schemes: list[Int4Scheme]) -> str:
        if not self._format.is_online:
            return _why_dequantized(spec, schemes)
        group = schemes[0].group_that_divides(spec.inputs)
        return why_not_packed((sum(spec.sizes), spec.inputs), group) if group else _no_group(spec.inputs)

    def _why_no_experts(self, linears: list[LinearSpec], schemes: Sequence[Scheme | None], first: Int4Scheme) -> str:
        if not self._format.is_online:
            return _why_no_experts(linears, schemes, first)
        lacking = [linear.inputs for linear in linears if not first.group_that_divides(linear.inputs)]
        return _no_group(lacking[0]) if lacking else ""


class W4Linear:
    """A packed weight and its kernels."""

    scaling: Scaling = Scaling.NONE

    def __init__(self, weight: W4Weight, bias: Tensor | None, *, is_deterministic: bool) -> None:
        """Take a weight [N, K]; gated ones serve gated() alone. `is_deterministic`: same bits in any batch."""
        self._weight, self._bias, self._is_deterministic = weight, bias, is_deterministic

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor) and not self._weight.is_gated, NOTHING_QUANTIZED
        outputs = self._few(x, is_gelu=False)
        return F.linear(x, dequantize(self._weight), self._bias) if outputs is None else outputs

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert isinstance(x, Tensor) and self._weight.is_gated, NOTHING_QUANTIZED
        is_gelu = gate.kind is GateKind.GELU_TANH
        if (outputs := self._few(x, is_gelu=is_gelu)) is not None:
            return outputs
        both = F.linear(x, dequantize(self._weight), self._bias)
        return gelu_tanh_and_mul(both) if is_gelu else silu_and_mul(both)

    def _few(self, x: Tensor, *, is_gelu: bool) -> Tensor | None:
        multiply = partial(w4_linear, weight=self._weight, bias=self._bias, is_gelu=is_gelu)
        if self._is_deterministic:
            parts = [multiply(part) for part in x.split(exact_rows(self._weight))]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(x) == 1 and serves_one_row(self._weight):
            return w4_one_row(x, self._weight, self._bias, is_gelu)
        return multiply(x) if len(x) <= MAX_ROWS else None


@cache
def log_16_bits(layers: str, reason: str) -> None:
    """Log once for all layers of a kind."""
    logger.info("4-bit weights of %s: in 16 bits: %s", layers, reason)


def _no_group(inputs: int) -> str:
    return f"they have {inputs} inputs, and the kernels need multiples of {GROUPS[-1]}"


def why_no_kernels(source: WeightSource) -> str:
    """Return why no layer has 4 bits on this device, or an empty string."""
    if not is_hopper(source.device):
        return f"the kernels need sm_90 (Hopper), and this is {torch.cuda.get_device_name(source.device)}"
    return "" if source.dtype == torch.bfloat16 else "the kernels need --dtype bfloat16"


def _why_dequantized(spec: LinearSpec, schemes: list[Int4Scheme]) -> str:
    """Return why a layer with 4-bit integers has 16 bits, or an empty string."""
    if len(schemes) < len(spec.names):
        return "some of its parts have no 4 bits"
    if len({_group_of(scheme.group or spec.inputs) for scheme in schemes}) > 1:
        return "its parts have groups of several sizes"
    return why_not_packed((sum(spec.sizes), spec.inputs), _group_of(schemes[0].group or spec.inputs))


def _why_no_experts(linears: list[LinearSpec], schemes: Sequence[Scheme | None], first: Int4Scheme) -> str:
    """Return why experts with 4-bit integers have 16 bits, or an empty string."""
    if any(scheme != first for scheme in schemes):
        return "they have several formats"
    groups = {_group_of(first.group or linear.inputs) for linear in linears}
    return "" if groups <= set(GROUPS) else "their groups are no multiples of 32"


def _group_of(inputs: int) -> int:
    """Return the largest group of the kernels that divides a group of the checkpoint, or that group."""
    return next((group for group in GROUPS if inputs % group == 0), inputs)


def stored_numbers(spec: LinearSpec, schemes: list[Int4Scheme], source: WeightSource) -> Int4Weight:
    """Return the checkpoint's numbers of a layer, in groups of the kernels."""
    parts = [
        read_int4(source, name, (size, spec.inputs), scheme)
        for name, size, scheme in zip(spec.names, spec.sizes, schemes, strict=True)
    ]
    values = torch.cat([part.values for part in parts])
    zeros = torch.cat([_in_groups(part.zeros, part) for part in parts])
    scales = torch.cat([_in_groups(part.scales, part) for part in parts])
    if spec.row_order is not None:
        order = spec.row_order.to(values.device)
        values, zeros, scales = values[order], zeros[order], scales[order]
    return Int4Weight(values, zeros, scales)


def _rows(spec: LinearSpec, source: WeightSource) -> Tensor:
    """Return the 16-bit weight of a layer, whose bytes count as not kept."""
    rows = rows_of(spec, source, "weight", (spec.inputs,))
    source.keep_as(rows.nbytes, 0)
    return rows


def _narrow(scales: Tensor) -> Tensor:
    """Return float32 scales in the first type of 16 bits that has them exactly, if there is one."""
    narrow = (scales.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((each for each in narrow if torch.equal(each.float(), scales)), scales)


def int4_experts(each: list[Int4Weight], source: WeightSource) -> Int4Experts:
    """Return the weight of one linear layer of all experts, from the numbers of each."""
    values = torch.stack([pack_int4(one.values, one.values.shape[1] // one.scales.shape[1]) for one in each])
    scales = torch.stack([one.scales.T for one in each])
    zeros = torch.stack([one.zeros.T for one in each])
    weight = Int4Experts(values, _narrow(scales), None if bool((zeros == MIDDLE).all()) else zeros)
    source.keep_as(0, weight.nbytes)
    return weight


def _in_groups(numbers: Tensor, weight: Int4Weight) -> Tensor:
    """Return numbers per group of the checkpoint, which may be larger, as numbers per group of the kernels."""
    group = weight.values.shape[1] // numbers.shape[1]
    return numbers.repeat_interleave(group // _group_of(group), 1)
