"""Devices: which one a worker has, what it refuses, and the operators of one forward pass on it.

CompiledStep, CpuStep and CudaStep are the implementations. Knows no network. It is used at a worker's start, and once a
step, when the operators of the pass are made.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.model.layers import AttentionWeights, NormWeight
from engine_worker.model.linear import Scaling
from engine_worker.model.model_input import ModelInput
from engine_worker.model.spec import ModelShape
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales
from kernels.scaled import Scaled

logger = logging.getLogger("worker")

FP8_CAPABILITY = (8, 9)  # the first with products of e4m3 (CUDA programming guide, tensor core data types)


class DeviceStep(Protocol):
    """The operators of one forward pass on one device."""

    def rms_norm(self, x: Tensor, norm: NormWeight) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """-> (normed, x + residual)"""

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling
    ) -> tuple[Scaled, Tensor]: ...
    def rotate_and_store(self, qkv: Tensor, attention: AttentionWeights, layer: int) -> None: ...
    def store(self, qkv: Tensor, layer: int) -> None:
        """Keys and values of `qkv` [T, (Hq + 2 Hkv) * D] as they are, for networks that rotate by themselves."""

    def attend(
        self, qkv: Tensor, scale: float, layer: int, rows: Tensor | None = None, rules: ScoreRules = NO_RULES
    ) -> Tensor: ...


class Device(Protocol):
    """A device with a KV pool on it."""

    def begin_step(self, model_input: ModelInput) -> DeviceStep: ...


def chosen_device(wanted: str, *, has_cuda: bool) -> str:
    """`cpu` or `cuda`, for `auto`, `cpu` or `cuda`. Raises ValueError where `cuda` is wanted and there is none."""
    if wanted == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device")
    if wanted != "auto":
        return wanted
    if not has_cuda:
        logger.info("no CUDA device: the model runs on the CPU (`pagestream doctor` says what there is)")
    return "cuda" if has_cuda else "cpu"


def check_quantization(quantization: str, device_type: str) -> None:
    """Raises ValueError where weights are asked for that the device does not multiply."""
    if quantization in {"int8", "as-stored"} and device_type != "cpu":
        raise ValueError(f"--quantization {quantization}: for a CPU; on {device_type}: auto, none, fp8")


def check_weight_format(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError where `device` cannot multiply weights of the format `name` beside `dtype`. Starts CUDA."""
    if not name or device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        told = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"weights: {name}; on cuda products of fp8 are bfloat16 and the model is {told}: --dtype bfloat16; "
            "--quantization none multiplies an fp8 checkpoint in any type"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        gpu, (major, minor) = torch.cuda.get_device_name(device), capability
        raise ValueError(
            f"weights: {name}; {gpu} (sm_{major}{minor}) multiplies no fp8, which takes sm_89 or newer (Ada, Hopper). "
            "--quantization none serves an fp8 checkpoint in 16 bits"
        )


def check_kv_dtype(kv_dtype: str, model_dtype: str, capability: tuple[int, int] | None) -> None:
    """Raises ValueError where no attention kernel reads a cache of `kv_dtype` beside such a model.

    `capability`: of the GPU; None on a CPU.
    """
    if capability is None or kv_dtype == model_dtype:
        return  # a CPU converts whatever it gathers
    if kv_dtype != "float8_e4m3fn":
        raise ValueError(
            f"--kv-cache-dtype {kv_dtype}: the model computes in {model_dtype}; on cuda the KV cache has that type or "
            "fp8 (auto, fp8)"
        )
    if model_dtype == "float32":
        raise ValueError(
            "--kv-cache-dtype fp8: on cuda beside bfloat16 and float16, to be had with --dtype; not float32"
        )
    if capability < FP8_CAPABILITY:
        raise ValueError(
            f"--kv-cache-dtype fp8: e4m3 needs a GPU of compute capability 8.9 or more (Ada, Hopper); this one has "
            f"{capability[0]}.{capability[1]}. auto and bf16 are accepted"
        )


def attach_device(
    shape: ModelShape,
    kv_pool: Tensor,
    dtype: torch.dtype,
    is_deterministic: bool = False,
    kv_scales: Sequence[KVScales] = (),
) -> Device:
    """The device on which `kv_pool` [num_blocks, L, 2, Hkv, BS, D] lies.

    `dtype`: that the model computes in. `kv_scales`: of each layer, for a pool in e4m3; 1 where there are none.
    """
    scales = tuple(kv_scales) if kv_scales and kv_pool.dtype == E4M3 else (UNIT_SCALES,) * shape.num_layers
    if kv_pool.is_cuda:
        from engine_worker.model.cuda_step import CudaDevice  # noqa: PLC0415 - imports triton, which a CPU has not

        return CudaDevice(shape, kv_pool, is_deterministic, scales)
    return _attach_cpu(shape, kv_pool, dtype, scales)


def _attach_cpu(shape: ModelShape, kv_pool: Tensor, dtype: torch.dtype, scales: tuple[KVScales, ...]) -> Device:
    """By the C++ kernels where they serve, else by torch's operators, and that is told."""
    from engine_worker.model.compiled_step import CompiledDevice, step_kernels  # noqa: PLC0415 - of a CPU alone
    from engine_worker.model.cpu_step import CpuDevice  # noqa: PLC0415
    from kernels.cpu.build import NoLibrary  # noqa: PLC0415

    try:
        return CompiledDevice(shape, kv_pool, step_kernels(shape, dtype, kv_pool.dtype), scales)
    except NoLibrary as error:
        logger.info("steps by torch's operators, slower, and a row's bits may depend on its batch: %s", error)
    return CpuDevice(shape, kv_pool, dtype, scales)
