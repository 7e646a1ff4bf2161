"""4- and 8-bit weights with scales per group of 32 inputs, on a CPU (kernels/cpu/linear.py).

They come from a GGUF file's blocks, or are quantized to 8 bits while they load. A layer without blocks, or with parts
in
several formats, stays in 16 bits.
"""

import logging

import torch
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
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.quantization.stored_blocks import StoredBlocks
from engine_worker.model.specs.gated_mlp import GateKind, GateSpec
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import cpu_library
from kernels.cpu.linear import Gate, GroupedWeight, PackedLinear, joined_rows, linear_kernels, quantized

logger = logging.getLogger("worker")

_GATES = {GateKind.SILU: Gate.SILU, GateKind.GELU_TANH: Gate.GELU_TANH}
_DTYPES = (torch.bfloat16, torch.float32)  # supported by the library


def why_no_kernels() -> str:
    """Return why the kernels are unavailable, as a clause, or an empty string; builds the library if needed."""
    try:
        linear_kernels()
    except NoLibrary as error:
        return str(error)
    return ""


def method(stored: WeightFormat, device_type: str) -> LinearMethod:
    """Return the method, or that of 16-bit weights with a log line if there are no C++ kernels."""
    assert device_type == "cpu", "checked by devices.check_quantization()"
    if reason := why_no_kernels():
        logger.warning("weights: falling back to 16 bits and torch operators, slower: no C++ kernels: %s", reason)
        return dense.method(device_type)
    logger.info("linear layers: %s, %s", stored.name, cpu_library().instruction_set.name)
    return GroupedMethod(stored, dense.method(device_type))


class GroupedMethod:
    """Linear layers in groups of 32 inputs."""

    def __init__(self, stored: WeightFormat, multiplied: LinearMethod) -> None:
        """Open the stored blocks, if any; `multiplied` serves layers that stay in 16 or 32 bits."""
        self._dense = multiplied
        self._blocks = StoredBlocks(stored.blocks) if stored.blocks else None

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = _quantized(spec, source) if self._blocks is None else self._stored(spec, source, self._blocks)
        if weight is None:
            return self._dense.load(spec, source)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        packed = PackedLinear(weight, spec.inputs, bias, is_gated=spec.role is Role.GATE_UP)
        source.keep_as(0, packed.nbytes)
        return GroupedLinear(packed)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        from engine_worker.model.quantization.experts_cpu import load_experts  # noqa: PLC0415 - only some models need it

        return load_experts(load, source, self)

    def _stored(self, spec: LinearSpec, source: WeightSource, blocks: StoredBlocks) -> GroupedWeight | None:
        names = [f"{name}.weight" for name in spec.names]
        parts = [blocks.get(name, (size, spec.inputs)) for name, size in zip(names, spec.sizes, strict=True)]
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.format for part in there}) > 1:
            logger.info("%s: kept in 16 bits: its parts do not share one 4- or 8-bit format", names[0])
            return None
        for name in names:
            source.leave(name)
        weight = joined_rows(there)
        return weight if spec.row_order is None else weight.rows(spec.row_order)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        stored = quantized(weight) if self._blocks is None else self._blocks.get(name, (len(weight), weight.shape[1]))
        if stored is None:
            logger.info("%s: kept in 16 bits: not stored in 4 or 8 bits", name)
            return self._dense.head(weight, name, source)
        packed = PackedLinear(stored, weight.shape[1])
        source.keep_as(0, packed.nbytes)
        return GroupedHead(packed)


def _quantized(spec: LinearSpec, source: WeightSource) -> GroupedWeight:
    rows = rows_of(spec, source, "weight", (spec.inputs,))
    source.keep_as(rows.nbytes, 0)
    return quantized(rows)


def _served(x: Tensor) -> Tensor:
    return x if x.dtype in _DTYPES else x.float()


class GroupedLinear:
    scaling: Scaling = Scaling.NONE  # rows are quantized by the kernel: 0.4 us per row of 576

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._packed(_served(x)).to(x.dtype)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._packed(_served(x), gate=_GATES[gate.kind]).to(x.dtype)


class GroupedHead:
    """The output head: logits are the float32 sums."""

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        return self._packed(_served(x), torch.empty(len(x), self._packed.outputs) if logits is None else logits)
