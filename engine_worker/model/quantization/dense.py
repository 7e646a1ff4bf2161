"""Weights as they are, in 16 or 32 bits: a tensor [outputs, inputs], the tensors of one product one below another.

    CPU     dense_cpu.py
    CUDA    dense_cuda.py

Knows no layer and no network. It is used at a worker's start, where weights load, and in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.model.linear import Head, Linear, LinearMethod, LinearSpec, Role
from engine_worker.model.weights import WeightSource


def method(device_type: str) -> LinearMethod:
    if device_type == "cuda":
        from engine_worker.model.quantization.dense_cuda import (  # noqa: PLC0415 - imports triton
            CudaHead,
            CudaLinear,
            tell_product,
        )

        return DenseMethod(CudaLinear, CudaHead, tell_product)
    from engine_worker.model.quantization.dense_cpu import CpuHead, CpuLinear  # noqa: PLC0415 - of a CPU alone

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

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        self._tell("head", weight, False)
        return self._head(weight)


def rows_of(spec: LinearSpec, source: WeightSource, part: str, rest: tuple[int, ...]) -> Tensor:
    """[sum(outputs), *rest]"""
    parts = [source.get(f"{name}.{part}", (size, *rest)) for name, size in zip(spec.names, spec.sizes, strict=True)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if spec.row_order is None else rows[spec.row_order.to(rows.device)]
