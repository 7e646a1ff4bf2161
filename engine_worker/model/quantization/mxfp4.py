"""Experts in MXFP4; all other layers are in 16 or 32 bits.

CUDA (kernels/moe) and a CPU (kernels/cpu/linear.py) multiply the stored numbers in another order. A CPU without C++
kernels keeps the stored bytes and dequantizes an expert when a step chooses it. With `--quantization none`, experts are
dequantized while they load.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.model.linear import Experts, ExpertsLoad, Head, Input, Linear, LinearMethod, LinearSpec
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.expert_weights import StackedExperts
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.specs.part import Part, Role
from engine_worker.model.weight_format import MXFP4_BLOCKS, MXFP4_SCALES, Mxfp4Scheme, WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.moe.mxfp4 import Mxfp4Experts, pack_mxfp4
from kernels.moe.weights import stacked
from kernels.scaled import Scaling

logger = logging.getLogger("worker")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of an e8m0 exponent


def method(stored: WeightFormat, device_type: str, is_deterministic: bool) -> LinearMethod:
    """Return the method of a format on a device type."""
    if stored.is_dequantized:
        logger.info("weights: %s: dequantized while loading: --quantization none", stored.name)
    elif device_type == "cpu" and (reason := _why_no_kernels()):
        logger.warning("experts: %s: dequantized for each step that chooses them, slower: %s", stored.name, reason)
    return Mxfp4Method(stored, device_type, is_deterministic)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the exact weight in bfloat16: e2m1 times a power of two.

    Args:
        blocks: [..., K / 32, 16], uint8; the low bits of a byte are the first of two values.
        scales: [..., K / 32], uint8, e8m0.

    Returns:
        [..., K], bfloat16. Exact for scales from 2^-125 to 2^125.
    """
    values = torch.tensor(_E2M1, device=blocks.device)[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()]
    return torch.ldexp(values.flatten(-2), (scales.int() - _BIAS)[..., None]).flatten(-2).bfloat16()


def read_mxfp4(source: WeightSource, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the blocks and scales of a stacked weight [experts, rows, columns].

    Raises:
        ValueError: If a tensor is missing or has another shape.
    """
    forms = Mxfp4Scheme().tensors(shape)
    blocks, scales = (
        source.get(name + suffix, forms[suffix].shape, dtype=torch.uint8) for suffix in (MXFP4_BLOCKS, MXFP4_SCALES)
    )
    return blocks, scales


class Mxfp4Method:
    """Linear layers of a model whose experts are in MXFP4."""

    def __init__(self, stored: WeightFormat, device_type: str, is_deterministic: bool = False) -> None:
        self._format, self._device_type = stored, device_type
        self._dense = dense.method(device_type, is_deterministic)

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        return self._dense.load(spec, source)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        return self._dense.head(weight, name, source)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        if self._format.is_dequantized:
            return self._dense.experts(load, DequantizedExperts(source, self._format))
        load = replace(load, shared=None)  # it would be in 16 bits
        if self._device_type == "cuda":
            from engine_worker.model.quantization.experts_cuda import CudaExperts  # noqa: PLC0415 - imports triton

            return CudaExperts(load, source, lambda linears, _: _packed(load, source, linears[0].role))
        return _on_cpu(load, source)


class DequantizedExperts:
    """The tensors of `source` with dequantized experts."""

    def __init__(self, source: WeightSource, stored: WeightFormat) -> None:
        self._source, self._format = source, stored
        self.device, self.dtype = source.device, source.dtype
        self.names: Collection[str] = source.names

    @property
    def loaded_bytes(self) -> int:
        return self._source.loaded_bytes

    def get(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if len(shape) != 3 or self._format.scheme_of(name) is None:
            return self._source.get(name, shape, part, dtype)
        blocks, scales = read_mxfp4(self._source, name, shape)
        made = dequantized(blocks, scales).to(self.dtype)
        self._source.keep_as(blocks.nbytes + scales.nbytes, made.nbytes)
        return made

    def keep_as(self, handed_out: int, kept: int) -> None:
        self._source.keep_as(handed_out, kept)

    def leave(self, name: str) -> None:
        self._source.leave(name)

    def check_all_used(self, ignored: Sequence[str] = ()) -> None:
        self._source.check_all_used(ignored)


class Mxfp4Linear:
    """A linear layer of one expert on a CPU, which is dequantized for each call."""

    scaling: Scaling = Scaling.NONE

    def __init__(self, blocks: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Hold the stored bytes: blocks [N, K / 32, 16] and scales [N, K / 32]."""
        self._blocks, self._scales, self._bias = blocks, scales, bias

    def __call__(self, x: Input) -> Tensor:
        return self._exact(x)(x)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Input:
        return self._exact(x).gated(x, gate, scaling)

    def _exact(self, x: Input) -> Linear:
        from engine_worker.model.quantization.dense_cpu import CpuLinear  # noqa: PLC0415 - CPU only

        assert isinstance(x, Tensor)
        return CpuLinear(dequantized(self._blocks, self._scales).to(x.dtype), self._bias)


def _why_no_kernels() -> str:
    from engine_worker.model.quantization.grouped import why_no_kernels  # noqa: PLC0415 - CPU only

    return why_no_kernels()


def _on_cpu(load: ExpertsLoad, source: WeightSource) -> Experts:
    from engine_worker.model.quantization.experts_cpu import LoopedExperts  # noqa: PLC0415 - CPU only
    from engine_worker.model.quantization.experts_grouped import in_one_call  # noqa: PLC0415 - CPU only

    single = StackedExperts(load, source)
    linears = [load.linears(expert) for expert in load.spec.experts]
    weights = [_stacked(load, source, role) for role in (Role.GATE_UP, Role.DOWN)]
    experts: list[tuple[Linear, Linear]] = []
    for place, specs in enumerate(linears):
        first, down = (
            _linear(blocks[place], scales[place], spec, rows_of(spec, single, "bias", ()) if spec.bias else None)
            for (blocks, scales), spec in zip(weights, specs, strict=True)
        )
        experts.append((first, down))
    return in_one_call(load, LoopedExperts(load, experts))


def _linear(blocks: Tensor, scales: Tensor, spec: LinearSpec, bias: Tensor | None) -> Linear:
    """Return a linear layer of one expert: blocks [N, K / 32, 16] and scales [N, K / 32]."""
    from engine_worker.model.quantization.grouped_linear import GroupedLinear  # noqa: PLC0415 - CPU only
    from kernels.cpu.linear import GroupedWeight, GroupFormat, PackedLinear  # noqa: PLC0415 - CPU only

    if _why_no_kernels():
        return Mxfp4Linear(blocks, scales, bias)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    lower, upper = numbers.chunk(2, dim=-1)
    weight = GroupedWeight(GroupFormat.E2M1, lower | upper << 4, scales)
    return GroupedLinear(PackedLinear(weight, spec.inputs, bias, is_gated=spec.role is Role.GATE_UP))


def _packed(load: ExpertsLoad, source: WeightSource, role: Role) -> Mxfp4Experts:
    """Return the packed weight of one linear layer of all experts."""
    blocks, scales = _stacked(load, source, role)
    packed = pack_mxfp4(blocks, scales, is_gated=role is Role.GATE_UP)
    source.keep_as(blocks.nbytes + scales.nbytes, packed.values.nbytes + packed.scales.nbytes)
    return packed


def _stacked(load: ExpertsLoad, source: WeightSource, role: Role) -> tuple[Tensor, Tensor]:
    """Return blocks and scales of all experts of this rank, gate rows before up rows."""
    spec = load.spec
    if role is Role.DOWN:
        return read_mxfp4(source, load.prefix + load.names.down, spec.stacked_shape(load.hidden, spec.inner))
    blocks, scales = read_mxfp4(
        source, load.prefix + load.names.gate_up[0], spec.stacked_shape(2 * spec.inner, load.hidden)
    )
    return (stacked(blocks), stacked(scales)) if spec.interleaved else (blocks, scales)
