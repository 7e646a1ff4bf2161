"""Weights as they are, in 16 or 32 bits: a tensor [outputs, inputs], the tensors of one product one below another.

    CPU     oneDNN's own layout where the processor multiplies bfloat16, else torch's product
    CUDA    dense_cuda.py

Knows no layer and no network.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTISED, Head, Input, Linear, LinearMethod, LinearSpec, Role, Scaling
from engine_worker.model.spec import Activation
from engine_worker.model.weights import WeightSource


def method(device_type: str) -> LinearMethod:
    if device_type == "cuda":
        from engine_worker.model.quantisation.dense_cuda import (  # noqa: PLC0415 - imports triton
            CudaHead,
            CudaLinear,
            tell_product,
        )

        return DenseMethod(CudaLinear, CudaHead, tell_product)
    return DenseMethod(CpuLinear, CpuHead, lambda name, weight, is_gated: None)


class DenseMethod:
    def __init__(
        self,
        linear: Callable[[Tensor, Tensor | None], Linear],
        head: Callable[[Tensor], Head],
        tell: Callable[[str, Tensor, bool], None],
    ) -> None:
        """`tell`: of a product's name, its weight and whether it is gated; what serves it is said once."""
        self._linear, self._head, self._tell = linear, head, tell

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = rows_of(spec, source, "weight", (spec.inputs,))
        self._tell(spec.role, weight, spec.role is Role.GATE_UP)
        return self._linear(weight, rows_of(spec, source, "bias", ()) if spec.bias else None)

    def head(self, weight: Tensor) -> Head:
        self._tell("head", weight, False)
        return self._head(weight)


def rows_of(spec: LinearSpec, source: WeightSource, part: str, rest: tuple[int, ...]) -> Tensor:
    """[sum(outputs), *rest]"""
    parts = [source.get(f"{name}.{part}", (size, *rest)) for name, size in zip(spec.names, spec.sizes, strict=True)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if spec.row_order is None else rows[spec.row_order.to(rows.device)]


class CpuLinear:
    scaling: Scaling = Scaling.NONE

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.is_packed = _is_packed(weight)
        # oneDNN's own layout halves the time of a bf16 product here: 1.1 against 2.7 ms for SmolLM2's head at T = 1.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.is_packed else weight
        self.bias = bias

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTISED
        if self.is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Input, activation: Activation, scaling: Scaling = Scaling.NONE) -> Tensor:
        gate, up = self(x).chunk(2, dim=-1)
        return activated(gate, activation).mul_(up)


def activated(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")


class CpuHead:
    """Logits are float32: the sums as they were accumulated, whatever the dtype of the weights.

    Rounded to bfloat16, logits between 16 and 32 are multiples of 1/8, and the two likeliest tokens are often one value
    (ADR 0101).
    """

    def __init__(self, weight: Tensor) -> None:
        # What oneDNN does not multiply in bfloat16 is multiplied in float32.
        self._linear = CpuLinear(weight if _is_packed(weight) else weight.float())

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        computed = self._product(x)
        return computed if logits is None else logits.copy_(computed)

    def _product(self, x: Tensor) -> Tensor:
        linear = self._linear
        if not linear.is_packed:
            return linear(x.to(linear.weight.dtype))
        # oneDNN's product has the type of its inputs. A second one subtracts the first before it rounds, so both
        # together have 16 bits: as long as reading a float32 copy of the head for one row, a third of it for 64.
        rounded = linear(x)
        rest = torch.ops.mkldnn._linear_pointwise.binary(x, rounded, linear.weight, None, "sub")
        return rounded.float().add_(rest)


def _is_packed(weight: Tensor) -> bool:
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
