"""Weights in 4 and 8 bits with scales for groups of 32 inputs, on a CPU: as a GGUF file has them, or 8 bits that are
made of 16 or 32 while they load. Rows are quantized by groups of 32, too (kernels/cpu/linear.py).

What has no blocks in the file, or parts in several formats, is multiplied in 16 bits. Knows no layer and no network. It
is used at a worker's start, where weights load, and in every step.
"""

import logging

import torch
from torch import Tensor

from engine_worker.model.linear import NOTHING_QUANTIZED, Head, Input, Linear, LinearMethod, LinearSpec, Role, Scaling
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.stored_blocks import StoredBlocks
from engine_worker.model.spec import Activation
from engine_worker.model.weight_format import WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import cpu_library
from kernels.cpu.linear import Gate, GroupedWeight, PackedLinear, joined_rows, linear_kernels, quantized

logger = logging.getLogger("worker")

_GATES = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH}
_DTYPES = (torch.bfloat16, torch.float32)  # of the library


def why_no_kernels() -> str:
    """Say why nothing multiplies such weights here, as the end of a sentence; empty where C++ does, compiled by now."""
    try:
        linear_kernels()
    except NoLibrary as error:
        return str(error)
    return ""


def method(stored: WeightFormat, device_type: str) -> LinearMethod:
    """Without the C++ kernels that multiply them weights have 16 bits, and the log says so."""
    assert device_type == "cpu", "devices.check_quantization() asks it of the settings"
    if lacking := why_no_kernels():
        logger.warning("weights: multiplied in 16 bits by torch's operators, slower: no C++ kernels: %s", lacking)
        return dense.method(device_type)
    logger.info("products: %s, %s", stored.name, cpu_library().instruction_set.name)
    return GroupedMethod(stored, dense.method(device_type))


class GroupedMethod:
    def __init__(self, stored: WeightFormat, multiplied: LinearMethod) -> None:
        """`multiplied`: what is left in 16 or 32 bits."""
        self._dense = multiplied
        self._blocks = StoredBlocks(stored.blocks) if stored.blocks else None

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = _quantized(spec, source) if self._blocks is None else self._stored(spec, source, self._blocks)
        if weight is None:
            return self._dense.load(spec, source)
        bias = dense.rows_of(spec, source, "bias", ()) if spec.bias else None
        packed = PackedLinear(weight, spec.inputs, bias, is_gated=spec.role is Role.GATE_UP)
        source.keep_as(0, packed.nbytes)
        return GroupedLinear(packed)

    def _stored(self, spec: LinearSpec, source: WeightSource, blocks: StoredBlocks) -> GroupedWeight | None:
        names = [f"{name}.weight" for name in spec.names]
        parts = [blocks.get(name, (size, spec.inputs)) for name, size in zip(names, spec.sizes, strict=True)]
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.format for part in there}) > 1:
            logger.info("%s: multiplied in 16 bits: its parts are not stored in one format of 4 or 8 bits", names[0])
            return None
        for name in names:
            source.leave(name)
        weight = joined_rows(there)
        return weight if spec.row_order is None else weight.rows(spec.row_order)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        stored = quantized(weight) if self._blocks is None else self._blocks.get(name, (len(weight), weight.shape[1]))
        if stored is None:
            logger.info("%s: multiplied in 16 bits: it is not stored in 4 or 8", name)
            return self._dense.head(weight, name, source)
        packed = PackedLinear(stored, weight.shape[1])
        source.keep_as(0, packed.nbytes)
        return GroupedHead(packed)


def _quantized(spec: LinearSpec, source: WeightSource) -> GroupedWeight:
    rows = dense.rows_of(spec, source, "weight", (spec.inputs,))
    source.keep_as(rows.nbytes, 0)
    return quantized(rows)


def _served(x: Tensor) -> Tensor:
    return x if x.dtype in _DTYPES else x.float()


class GroupedLinear:
    scaling: Scaling = Scaling.NONE  # a row is quantized where it is multiplied: 0.4 us a row of 576

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._packed(_served(x)).to(x.dtype)

    def gated(self, x: Input, activation: Activation, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert isinstance(x, Tensor), NOTHING_QUANTIZED
        return self._packed(_served(x), gate=_GATES[activation]).to(x.dtype)


class GroupedHead:
    """Logits are the float32 sums, as every head's are."""

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        return self._packed(_served(x), torch.empty(len(x), self._packed.outputs) if logits is None else logits)
