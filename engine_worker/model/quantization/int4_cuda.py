"""4-bit integers on Hopper GPUs: kernels/w4a16 for few rows; with more, the library multiplies dequantized weights.

A layer that the kernels do not know is dequantized to 16 bits while it loads, and so are experts.
"""

import logging
from functools import cache

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
    Scaling,
)
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.dequantized import DequantizedMethod
from engine_worker.model.quantization.int4 import MIDDLE, Int4Weight, read_int4
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.gated_mlp import GateKind, GateSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import Int4Scheme, WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.moe.list_product import is_hopper
from kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.few_rows import INVARIANT_ROWS, MAX_ROWS, w4_linear
from kernels.w4a16.weights import GROUPS, W4Weight, pack_w4, why_not_packed

logger = logging.getLogger("worker")


def method(stored: WeightFormat, is_deterministic: bool) -> LinearMethod:
    """Return the method of a format."""
    return Int4Method(stored, DequantizedMethod(stored, dense.method("cuda")), is_deterministic)


class Int4Method:
    """Linear layers of 4-bit integers. The head, and what the checkpoint has in 16 bits, is not quantized."""

    def __init__(self, stored: WeightFormat, dequantized: LinearMethod, is_deterministic: bool) -> None:
        self._format, self._dequantized, self._is_deterministic = stored, dequantized, is_deterministic

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        schemes = [scheme for name in spec.names if isinstance(scheme := self._format.scheme_of(name), Int4Scheme)]
        if not schemes:
            return self._dequantized.load(spec, source)
        if why := _why_not(source) or _why_dequantized(spec, schemes):
            _log(spec.role, why)
            return self._dequantized.load(spec, source)
        parts = zip(spec.names, spec.sizes, schemes, strict=True)
        weight = _packed(
            [read_int4(source, name, (size, spec.inputs), scheme) for name, size, scheme in parts],
            spec.row_order,
            is_gated=spec.role is Role.GATE_UP,
        )
        source.keep_as(0, weight.nbytes)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        return W4Linear(weight, bias, is_deterministic=self._is_deterministic)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        _log("experts", "there are no kernels for them")
        return self._dequantized.experts(load, source)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dequantized.head(weight, name, source)


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
        if self._is_deterministic and len(x) > INVARIANT_ROWS:
            return torch.cat([w4_linear(part, self._weight, self._bias, is_gelu) for part in x.split(INVARIANT_ROWS)])
        return w4_linear(x, self._weight, self._bias, is_gelu) if len(x) <= MAX_ROWS else None


@cache
def _log(layers: str, reason: str) -> None:
    """Log once for all layers of a kind."""
    logger.info("4-bit weights of %s: dequantized to 16 bits while loading: %s", layers, reason)


def _why_not(source: WeightSource) -> str:
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


def _group_of(inputs: int) -> int:
    """Return the largest group of the kernels that divides a group of the checkpoint, or that group."""
    return next((group for group in GROUPS if inputs % group == 0), inputs)


def _packed(parts: list[Int4Weight], row_order: Tensor | None, *, is_gated: bool) -> W4Weight:
    values = torch.cat([part.values for part in parts])
    zeros = torch.cat([_in_groups(part.zeros, part) for part in parts])
    scales = torch.cat([_in_groups(part.scales, part) for part in parts])
    if row_order is not None:
        order = row_order.to(values.device)
        values, zeros, scales = values[order], zeros[order], scales[order]
    halves = scales.half()
    halves = halves if torch.equal(halves.float(), scales) else scales.bfloat16()
    return pack_w4(values, halves, None if bool((zeros == MIDDLE).all()) else zeros, is_gated=is_gated)


def _in_groups(numbers: Tensor, weight: Int4Weight) -> Tensor:
    """Return numbers per group of the checkpoint, which may be larger, as numbers per group of the kernels."""
    group = weight.values.shape[1] // numbers.shape[1]
    return numbers.repeat_interleave(group // _group_of(group), 1)
