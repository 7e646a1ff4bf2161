"""Unquantized weights in 16 or 32 bits; tensors of one layer are concatenated. Kernels: dense_cpu.py, dense_cuda.py."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Head, Linear, LinearMethod, LinearSpec
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.part import Role
from engine_worker.model.weights import WeightSource


def method(device_type: str, is_deterministic: bool = False) -> LinearMethod:
    """Return the method of a device type; `is_deterministic`: rows must have the same bits in any batch."""
    if device_type == "cuda":
        from engine_worker.model.quantization.dense_cuda import (  # noqa: PLC0415 - imports triton
            CudaHead,
            CudaLinear,
            log_kernel,
        )

        linear = partial(CudaLinear, is_deterministic=is_deterministic)
        head = partial(CudaHead, is_deterministic=is_deterministic)
        return DenseMethod(linear, head, _cuda_experts, log_kernel)
    from engine_worker.model.quantization.dense_cpu import CpuHead, CpuLinear  # noqa: PLC0415 - CPU only

    return DenseMethod(CpuLinear, CpuHead, _cpu_experts, lambda name, weight, is_gated: None)


class DenseMethod:
    def __init__(
        self,
        linear: Callable[[Tensor, Tensor | None], Linear],
        head: Callable[[Tensor], Head],
        experts: Callable[[ExpertsLoad, WeightSource, LinearMethod], Experts],
        log: Callable[[str, Tensor, bool], None],
    ) -> None:
        """Wrap the device's classes; `log` reports the kernel for a layer's name, weight and gating."""
        self._linear, self._head, self._experts, self._log = linear, head, experts, log

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = rows_of(spec, source, "weight", (spec.inputs,))
        self._log(spec.role, weight, spec.role is Role.GATE_UP)
        return self._linear(weight, rows_of(spec, source, "bias", ()) if spec.bias else None)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        return self._experts(load, source, self)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        self._log("head", weight, False)
        return self._head(weight)


def _cpu_experts(load: ExpertsLoad, source: WeightSource, method: LinearMethod) -> Experts:
    from engine_worker.model.quantization.experts_cpu import (  # noqa: PLC0415 - only some models need it
        load_experts,
        log_loop,
    )

    log_loop()
    return load_experts(load, source, method)


def _cuda_experts(load: ExpertsLoad, source: WeightSource, method: LinearMethod) -> Experts:
    from engine_worker.model.quantization.experts_cuda import CudaExperts, dense_weight  # noqa: PLC0415 - as above

    return CudaExperts(load, source, dense_weight)
