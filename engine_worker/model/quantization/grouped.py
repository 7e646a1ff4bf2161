"""4- and 8-bit weights with scales per group of 32 inputs, on a CPU (kernels/cpu/linear.py).

They come from a GGUF file's blocks, are 4-bit integers of a checkpoint, or are quantized to 4 or 8 bits while they
load. A layer without such numbers, or with parts in several formats, stays in 16 bits.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.model.linear import (
    Experts,
    ExpertsLoad,
    Head,
    Linear,
    LinearMethod,
    LinearSpec,
)
from engine_worker.model.quantization import dense
from engine_worker.model.quantization.dequantized import DequantizedMethod
from engine_worker.model.quantization.grouped_linear import GroupedLinear, served
from engine_worker.model.quantization.int4 import in_groups, read_int4
from engine_worker.model.quantization.rows import rows_of
from engine_worker.model.specs.part import Role
from engine_worker.model.stored_blocks import StoredBlocks
from engine_worker.model.weight_format import Int4Scheme, WeightFormat
from engine_worker.model.weights import WeightSource
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import cpu_library
from kernels.cpu.linear import (
    GROUP,
    GroupedWeight,
    PackedLinear,
    joined_rows,
    linear_kernels,
    quantized,
    quantized_to_4_bits,
)

logger = logging.getLogger("worker")


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
    multiplied = dense.method(device_type)
    numbers = StoredNumbers(StoredBlocks(stored.blocks)) if stored.blocks else RoundedNumbers(stored.has_4_bits)
    return multiplied if _lacks_kernels() else _grouped(stored, numbers, multiplied)


def int4_method(stored: WeightFormat, device_type: str, is_deterministic: bool) -> LinearMethod:
    """Return the method of 4-bit integers; they are dequantized to 16 bits unless the format is in groups."""
    multiplied = DequantizedMethod(stored, dense.method(device_type, is_deterministic))
    if not stored.in_groups:
        logger.info("weights: %s: dequantized while loading", stored.name)
        return multiplied
    return multiplied if _lacks_kernels() else _grouped(stored, Int4Numbers(stored), multiplied)


def _lacks_kernels() -> bool:
    reason = why_no_kernels()
    if reason:
        logger.warning("weights: falling back to 16 bits and torch operators, slower: no C++ kernels: %s", reason)
    return bool(reason)


def _grouped(stored: WeightFormat, numbers: "Numbers", multiplied: LinearMethod) -> "GroupedMethod":
    logger.info("linear layers: %s, %s", stored.name, cpu_library().instruction_set.name)
    return GroupedMethod(numbers, multiplied)


class Numbers(Protocol):
    """Where the numbers in groups come from. None: the layer must stay in 16 or 32 bits."""

    def format_of(self, name: str) -> object:
        """Return how the weight of a layer is stored, to compare with that of others."""

    def rows(self, spec: LinearSpec, source: WeightSource) -> GroupedWeight | None:
        """Return the weight of a linear layer, in its row order."""

    def head(self, weight: Tensor, name: str) -> GroupedWeight | None:
        """Return the output head, whose tensor is `name`."""


class RoundedNumbers:
    """16- or 32-bit weights, rounded to 4 or 8 bits. The head has 8 bits."""

    def __init__(self, has_4_bits: bool) -> None:
        self._quantized = quantized_to_4_bits if has_4_bits else quantized

    def format_of(self, name: str) -> object:
        return None

    def rows(self, spec: LinearSpec, source: WeightSource) -> GroupedWeight | None:
        rows = rows_of(spec, source, "weight", (spec.inputs,))
        source.keep_as(rows.nbytes, 0)
        return self._quantized(rows)

    def head(self, weight: Tensor, name: str) -> GroupedWeight | None:
        return quantized(weight)


class StoredNumbers:
    """The blocks of a GGUF file."""

    def __init__(self, blocks: StoredBlocks) -> None:
        self._blocks = blocks

    def format_of(self, name: str) -> object:
        return self._blocks.type_of(f"{name}.weight")

    def rows(self, spec: LinearSpec, source: WeightSource) -> GroupedWeight | None:
        names = [f"{name}.weight" for name in spec.names]
        parts = [self._blocks.get(name, (size, spec.inputs)) for name, size in zip(names, spec.sizes, strict=True)]
        if (weight := _joined(spec, parts)) is not None:
            for name in names:
                source.leave(name)
        return weight

    def head(self, weight: Tensor, name: str) -> GroupedWeight | None:
        stored = self._blocks.get(name, (len(weight), weight.shape[1]))
        if stored is None:
            logger.info("%s: kept in 16 bits: not stored in 4 or 8 bits", name)
        return stored


class Int4Numbers:
    """4-bit integers of compressed-tensors, GPTQ or AWQ. The head is in 16 bits."""

    def __init__(self, stored: WeightFormat) -> None:
        self._format = stored

    def format_of(self, name: str) -> object:
        return self._format.scheme_of(name)

    def rows(self, spec: LinearSpec, source: WeightSource) -> GroupedWeight | None:
        schemes = [self._format.scheme_of(name) for name in spec.names]
        found = [scheme for scheme in schemes if isinstance(scheme, Int4Scheme)]
        if len(found) < len(schemes) or spec.inputs % GROUP:
            reason = f"its inputs are not a multiple of {GROUP}" if spec.inputs % GROUP else "some parts have no 4 bits"
            logger.info("%s: kept in 16 bits: %s", spec.names[0], reason)
            return None
        parts = zip(spec.names, spec.sizes, found, strict=True)
        return _joined(
            spec, [in_groups(read_int4(source, name, (size, spec.inputs), scheme)) for name, size, scheme in parts]
        )

    def head(self, weight: Tensor, name: str) -> GroupedWeight | None:
        return None


def _joined(spec: LinearSpec, parts: Sequence[GroupedWeight | None]) -> GroupedWeight | None:
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        logger.info("%s: kept in 16 bits: some of its parts are not in groups of 32", spec.names[0])
        return None
    weight = joined_rows(there)
    return weight if spec.row_order is None else weight.rows(spec.row_order)


class GroupedMethod:
    """Linear layers in groups of 32 inputs."""

    def __init__(self, numbers: Numbers, multiplied: LinearMethod) -> None:
        """Use `multiplied` for layers that stay in 16 or 32 bits."""
        self._numbers, self._dense = numbers, multiplied

    def load(self, spec: LinearSpec, source: WeightSource) -> Linear:
        weight = self._numbers.rows(spec, source)
        if weight is None:
            return self._dense.load(spec, source)
        bias = rows_of(spec, source, "bias", ()) if spec.bias else None
        packed = PackedLinear(weight, spec.inputs, bias, is_gated=spec.role is Role.GATE_UP)
        source.keep_as(0, packed.nbytes)
        return GroupedLinear(packed)

    def experts(self, load: ExpertsLoad, source: WeightSource) -> Experts:
        from engine_worker.model.quantization.experts_grouped import (  # noqa: PLC0415 - only some models need it
            load_grouped_experts,
        )

        return load_grouped_experts(load.in_one_format(self._numbers.format_of), source, self)

    def head(self, weight: Tensor, name: str, source: WeightSource) -> Head:
        numbers = self._numbers.head(weight, name)
        if numbers is None:
            return self._dense.head(weight, name, source)
        packed = PackedLinear(numbers, weight.shape[1])
        source.keep_as(0, packed.nbytes)
        return GroupedHead(packed)


class GroupedHead:
    """The output head: logits are the float32 sums."""

    def __init__(self, packed: PackedLinear) -> None:
        self._packed = packed

    def __call__(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        return self._packed(served(x), torch.empty(len(x), self._packed.outputs) if logits is None else logits)
