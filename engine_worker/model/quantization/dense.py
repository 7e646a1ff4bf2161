"""Unquantized weights in 16 or 32 bits; tensors of one layer are concatenated. Kernels: dense_cpu.py, dense_cuda.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.model.linear import Head, Linear, LinearMethod, LinearSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weights import WeightSource


def method(device_type: str) -> LinearMethod:
    """Return the method of a device type."""
    if device_type == "cuda":
        from engine_worker.model.quantization.dense_cuda import (  # noqa: PLC0415 - imports triton
            CudaHead,
            CudaLinear,
            log_kernel,
        )

        return DenseMethod(CudaLinear, CudaHead, log_kernel)
    from engine_worker.model.quantization.dense_cpu import CpuHead, CpuLinear  # noqa: PLC0415 - CPU only

    return DenseMethod(CpuLinear, CpuHead, lambda name, weight, is_gated: None)


class DenseMethod:
    def __init__(
        self,
        linear: Callable[[Tensor, Tensor | None], Linear],
        head: Callable[[Tensor], Head],
        log: Callable[[str, Tensor, bool], None],
    ) -> None:
        """Wrap the device's classes; `log` reports the kernel for a layer's name, weight and gating."""
        self._linear, self._head, self._log = linear, head, log

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = rows_of(spec, source, "weight", (spec.inputs,))
        self._log(spec.role, weight, spec.role is Role.GATE_UP)
        return self._linear(weight, rows_of(spec, source, "bias", ()) if spec.bias else None)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        self._log("head", weight, False)
        return self._head(weight)


def rows_of(spec: LinearSpec, source: WeightSource, part: str, rest: tuple[int, ...]) -> Tensor:
    """Return the rows of all parts, [sum(outputs), *rest], in the layer's row order."""
    parts = [source.get(f"{name}.{part}", (size, *rest)) for name, size in zip(spec.names, spec.sizes, strict=True)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if spec.row_order is None else rows[spec.row_order.to(rows.device)]
