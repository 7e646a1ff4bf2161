"""Devices: selection, limits, and the operators of one forward pass on a device.

CompiledStep, CpuStep and CudaStep implement DeviceStep.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.kv.layout import ITEMSIZES, Place
from engine_worker.model.convolutions import Convolutions
from engine_worker.model.layers import AttentionWeights, NormWeight
from engine_worker.model.linear import Input
from engine_worker.model.model_input import ModelInput
from engine_worker.model.recurrent import RecurrentPlan
from engine_worker.model.spec import ModelShape, has_convolutions
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales
from kernels.scaled import Scaled, Scaling

logger = logging.getLogger("worker")

FP8_CAPABILITY = (8, 9)  # first with e4m3 matrix products (CUDA programming guide, tensor core data types)
# kind of weights: first and last compute capability with kernels, and their names
_CAPABILITIES = {
    "fp8": (FP8_CAPABILITY, (99, 9), "sm_89 (Ada, Hopper)"),
    "mxfp4": ((9, 0), (9, 0), "sm_90 (Hopper)"),  # kernels/moe/list_product.py is for wgmma
    "int4 at load": ((9, 0), (9, 0), "sm_90 (Hopper)"),  # so is kernels/w4a16
}


class DeviceStep(Protocol):
    """The operators of one forward pass on one device."""

    def rms_norm(self, x: Tensor, norm: NormWeight) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual)."""

    def add_rms_norm_quantized(
        self, x: Tensor, residual: Tensor, norm: NormWeight, scaling: Scaling, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]: ...
    def rotate_and_store(self, qkv: Tensor, attention: AttentionWeights, layer: int) -> None: ...
    def store(self, qkv: Tensor, layer: int) -> None:
        """Store keys and values of qkv [T, (Hq + 2 Hkv) * D] unrotated, for networks that rotate themselves."""

    def attend(
        self, qkv: Tensor, scale: float, layer: int, rows: Tensor | None = None, rules: ScoreRules = NO_RULES
    ) -> Tensor: ...

    def multiply(self, x: Tensor, factor: float) -> Tensor:
        """Return x [T, N] times a factor; x may be overwritten."""

    def multiply_sigmoid(self, x: Tensor, gate: Tensor, scaling: Scaling) -> Input:
        """Return x [T, N] times the sigmoid of gate [T, N], quantized by `scaling`; x may be overwritten."""

    @property
    def convolutions(self) -> Convolutions:
        """The step's short convolutions, planned when the first one runs."""

    @property
    def recurrent(self) -> RecurrentPlan:
        """The step's recurrent layers, planned when the first one runs."""


class Device(Protocol):
    """A device with its KV pool."""

    def begin_step(self, model_input: ModelInput) -> DeviceStep: ...


def chosen_device(wanted: str, *, has_cuda: bool) -> str:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`.

    Raises:
        ValueError: If `cuda` is wanted and there is none.
    """
    if wanted == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device")
    if wanted != "auto":
        return wanted
    if not has_cuda:
        logger.info("no CUDA device: the model runs on the CPU (see `pagestream doctor`)")
    return "cuda" if has_cuda else "cpu"


def check_quantization(quantization: str, device_type: str) -> None:
    """Check the format against the device type.

    Raises:
        ValueError: If the device type does not support `quantization`.
    """
    if quantization == "int8" and device_type != "cpu":
        raise ValueError(f"--quantization int8 needs --device cpu; on {device_type} use auto, none, fp8 or int4")


def check_weight_format(name: str, kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Check a weight format against the device and the model's dtype; initializes CUDA.

    Raises:
        ValueError: If the device does not support the format `name` of `kind`, or not with `dtype`.
    """
    if kind not in _CAPABILITIES or device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        dtype_name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"weights: {name}; {kind} linear layers on cuda need --dtype bfloat16, and the model is {dtype_name}; "
            f"--quantization none dequantizes an {kind} checkpoint to any dtype"
        )
    capability, (first, last, needed) = torch.cuda.get_device_capability(device), _CAPABILITIES[kind]
    if not first <= capability <= last:
        gpu, (major, minor) = torch.cuda.get_device_name(device), capability
        raise ValueError(
            f"weights: {name}; {gpu} (sm_{major}{minor}) does not support {kind}, which needs {needed}. "
            f"Use --quantization none to dequantize an {kind} checkpoint to 16 bits"
        )


def check_kv_dtype(kv_dtype: str, model_dtype: str, capability: tuple[int, int] | None) -> None:
    """Check the KV dtype against the model's dtype and the GPU.

    Args:
        kv_dtype: A key of kv.layout.ITEMSIZES.
        model_dtype: Dtype of the model.
        capability: Compute capability of the GPU; None on a CPU.

    Raises:
        ValueError: If no attention kernel supports the combination.
    """
    if capability is None or kv_dtype == model_dtype:
        return  # a CPU converts what it gathers
    if kv_dtype != "float8_e4m3fn":
        raise ValueError(
            f"--kv-cache-dtype {kv_dtype}: the model computes in {model_dtype}; on cuda use that dtype (auto) or fp8"
        )
    if model_dtype == "float32":
        raise ValueError("--kv-cache-dtype fp8: on cuda needs --dtype bfloat16 or float16, not float32")
    if capability < FP8_CAPABILITY:
        raise ValueError(
            f"--kv-cache-dtype fp8: e4m3 needs compute capability 8.9 or more (Ada, Hopper); this GPU has "
            f"{capability[0]}.{capability[1]}. Use auto or bf16"
        )


def check_convolutions(shape: ModelShape, kv_dtype: str) -> None:
    """Check a model with short convolutions against the KV dtype.

    Raises:
        ValueError: If the dtype does not support them.
    """
    if has_convolutions(shape) and ITEMSIZES[kv_dtype] == 1:
        raise ValueError(
            f"--kv-cache-dtype {kv_dtype}: the model's short convolutions keep their inputs in the KV cache, "
            "which fp8 would round to 4 bits; use auto, bf16 or fp32"
        )


def attach_device(
    shape: ModelShape,
    kv_pool: Tensor,
    dtype: torch.dtype,
    is_deterministic: bool = False,
    kv_scales: Sequence[KVScales] = (),
    places: Sequence[Place] = (),
    states: Tensor | None = None,
) -> Device:
    """Return the device that holds `kv_pool`.

    Args:
        shape: The model's shape.
        kv_pool: [num_blocks, P, 2, Hkv, BS, D].
        dtype: Dtype of the model.
        is_deterministic: Use batch-invariant kernels.
        kv_scales: Per layer, for an e4m3 pool; default 1.
        places: The group and the place of each layer in the pool (KVLayout.places); (): one group, in their order.
        states: [num_blocks, layers, values] float32, the state pool; None: the model has no recurrent layers.
    """
    scales = tuple(kv_scales) if kv_scales and kv_pool.dtype == E4M3 else (UNIT_SCALES,) * len(shape.cache_layers)
    if kv_pool.is_cuda:
        from engine_worker.model.cuda_step import CudaDevice  # noqa: PLC0415 - imports triton, which a CPU worker lacks

        return CudaDevice(shape, kv_pool, is_deterministic, scales, places, states)
    return _attach_cpu(shape, kv_pool, dtype, scales, places, states)


def _attach_cpu(
    shape: ModelShape,
    kv_pool: Tensor,
    dtype: torch.dtype,
    scales: tuple[KVScales, ...],
    places: Sequence[Place],
    states: Tensor | None,
) -> Device:
    """Use the C++ kernels if they support the model, else torch's operators with a log line."""
    from engine_worker.model.compiled_step import CompiledDevice, step_kernels  # noqa: PLC0415 - CPU only
    from engine_worker.model.cpu_step import CpuDevice  # noqa: PLC0415
    from kernels.cpu.build import NoLibrary  # noqa: PLC0415

    try:
        kernels = step_kernels(shape, dtype, kv_pool.dtype)
        logger.info("steps: C++ kernels, %s", kernels.instruction_set.name)
        return CompiledDevice(shape, kv_pool, kernels, scales, places, states)
    except NoLibrary as error:
        logger.info("steps: falling back to torch operators, slower and not batch-invariant: %s", error)
    return CpuDevice(shape, kv_pool, dtype, scales, places, states)
