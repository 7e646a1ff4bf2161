"""How the weights of linear layers are stored, as frozen values: the schemes, and which modules have them.

A format is read from a checkpoint by quantization_config/, or chosen by `--quantization`.
"""

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import ClassVar

from engine_worker.model.specs.part import Part, Shape

# Suffixes of the tensors beside a layer's `weight`; checkpoint.py maps other names to them.
WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"

BLOCK = 128  # rows and columns per scale
_SCALE_BYTES = 4  # float32

MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
MXFP4_GROUP = 32  # columns per scale
INT4_GROUP = 32  # columns per scale of the C++ kernels
INT4_GROUPS = (128, 64, 32)  # columns per scale of the GPU's kernels
METHODS = ("awq", "gptq", "compressed-tensors")  # values of `quant_method` that `--quantization` can require

FLOATS = ("F32", "F16", "BF16")  # safetensors' notation
FP8, BYTES = ("F8_E4M3",), ("U8",)
INT32, INT64 = ("I32",), ("I64",)
NIBBLES = 8  # 4-bit integers in an int32


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The shape of a stored tensor and its accepted dtypes, in safetensors' notation."""

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS


class ScalePer(StrEnum):
    """What one scale covers."""

    TENSOR = "tensor"
    ROW = "row"  # one output
    BLOCK = "block"  # BLOCK rows and columns; smaller at the edges


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """An fp8 weight: e4m3 * scale."""

    kind: ClassVar[str] = "fp8"
    per: ScalePer
    has_input_scale: bool = False  # activations have one static scale

    @property
    def granule(self) -> tuple[int, int]:
        """Rows and columns that a rank must not cut."""
        return (BLOCK, BLOCK) if self.per is ScalePer.BLOCK else (1, 1)

    def tensors(self, shape: Shape) -> dict[str, TensorForm]:
        """Return the tensors of a weight [rows, columns], by what is added to the module's name."""
        rows, columns = shape
        found = {".weight": TensorForm(shape, FP8), f".{WEIGHT_SCALE}": TensorForm(self.scale_shape(rows, columns))}
        return found | ({f".{INPUT_SCALE}": TensorForm(())} if self.has_input_scale else {})

    def parts(self, part: Part) -> dict[str, Part]:
        """Return the parts of these tensors for a part of the weight; a tensor that is not listed is replicated."""
        found = {".weight": part}
        if self.per is ScalePer.ROW and part.dim == 0:
            found[f".{WEIGHT_SCALE}"] = part
        if self.per is ScalePer.BLOCK:
            blocks = tuple((start // BLOCK, -(-end // BLOCK)) for start, end in part.ranges)
            found[f".{WEIGHT_SCALE}"] = Part(part.dim, blocks)
        return found

    def num_bytes(self, shape: Shape) -> int:
        """Return the size of a weight [rows, columns], or [experts, rows, columns], as a device multiplies it."""
        *experts, rows, columns = shape
        num_scales = math.prod(experts) * math.prod(self.scale_shape(rows, columns))
        return math.prod(shape) + num_scales * _SCALE_BYTES

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight, or of a rank's part of it."""
        if self.per is ScalePer.TENSOR:
            return ()
        return (rows,) if self.per is ScalePer.ROW else (-(-rows // BLOCK), -(-columns // BLOCK))


@dataclass(frozen=True, kw_only=True)
class Mxfp4Scheme:
    """The stacked weights of experts in MXFP4: e2m1 values, two per byte, with an e8m0 scale per 32 columns.

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """

    kind: ClassVar[str] = "mxfp4"
    granule: ClassVar[tuple[int, int]] = (1, MXFP4_GROUP)

    def tensors(self, shape: Shape) -> dict[str, TensorForm]:
        """Return the tensors of a weight [experts, rows, columns]; see Fp8Scheme."""
        groups = (*shape[:-1], -(-shape[-1] // MXFP4_GROUP))
        return {
            MXFP4_BLOCKS: TensorForm((*groups, MXFP4_GROUP // 2), BYTES),
            MXFP4_SCALES: TensorForm(groups, BYTES),
        }

    def parts(self, part: Part) -> dict[str, Part]:
        """Return the parts of these tensors; see Fp8Scheme."""
        is_columns = part.dim == 2
        ranges = tuple((start // MXFP4_GROUP, end // MXFP4_GROUP) for start, end in part.ranges)
        found = Part(part.dim, ranges) if is_columns else part
        return {MXFP4_BLOCKS: found, MXFP4_SCALES: found}

    def num_bytes(self, shape: Shape) -> int:
        """Return the size of a weight [experts, rows, columns]."""
        return math.prod(shape) // 2 + math.prod(shape) // MXFP4_GROUP


class Packing(StrEnum):
    """Who wrote 4-bit integers, which decides names and layout of their tensors."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"


ROWS, COLUMNS, GROUP = 0, 1, 0  # dimensions of a weight; GROUP as a number of elements is that of the scheme
# For each dimension of a stored tensor: the dimension of the weight, and the elements of it that one entry covers.
Axes = tuple[tuple[int, int], ...]
INT4_VALUES, INT4_SCALES, INT4_ZEROS = ".weight_packed", ".weight_scale", ".weight_zero_point"
GPTQ_VALUES, GPTQ_SCALES, GPTQ_ZEROS, GPTQ_GROUPS = ".qweight", ".scales", ".qzeros", ".g_idx"
INT4_SHAPE = ".weight_shape"
_PER_GROUP: dict[str, Axes] = {
    GPTQ_ZEROS: ((COLUMNS, GROUP), (ROWS, NIBBLES)),
    GPTQ_SCALES: ((COLUMNS, GROUP), (ROWS, 1)),
}
_AXES: dict[Packing, dict[str, Axes]] = {
    Packing.COMPRESSED_TENSORS: {
        INT4_VALUES: ((ROWS, 1), (COLUMNS, NIBBLES)),
        INT4_SCALES: ((ROWS, 1), (COLUMNS, GROUP)),
        INT4_ZEROS: ((ROWS, NIBBLES), (COLUMNS, GROUP)),
    },
    Packing.GPTQ: {GPTQ_VALUES: ((COLUMNS, NIBBLES), (ROWS, 1)), **_PER_GROUP},
    Packing.AWQ: {GPTQ_VALUES: ((COLUMNS, 1), (ROWS, NIBBLES)), **_PER_GROUP},
}


@dataclass(frozen=True, kw_only=True)
class Int4Scheme:
    """A weight of 4-bit integers with a scale per group of columns: (integer - zero point) * scale.

    Sources: compressed-tensors' `pack-quantized` compressor, AutoGPTQ's and AutoAWQ's quantized linear layers.

    Attributes:
        packing: The layout.
        group: Columns per scale; 0: all columns of a row.
        has_zeros: Zero points are stored; otherwise each is 8.
        zeros_less_one: Stored zero points are one less (GPTQ's first version).
    """

    kind: ClassVar[str] = "int4"
    packing: Packing
    group: int
    has_zeros: bool = True
    zeros_less_one: bool = False

    @property
    def granule(self) -> tuple[int, int]:
        """Rows and columns that a rank must not cut."""
        units = {
            dim: [unit for axes in self.axes.values() for at, unit in axes if at == dim] for dim in (ROWS, COLUMNS)
        }
        return math.lcm(*filter(None, units[ROWS])), math.lcm(*filter(None, [*units[COLUMNS], self.group]))

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes of each tensor, by what is added to the module's name."""
        found = _AXES[self.packing]
        return found if self.has_zeros else {suffix: axes for suffix, axes in found.items() if suffix != INT4_ZEROS}

    def tensors(self, shape: Shape) -> dict[str, TensorForm]:
        """Return the tensors of a weight [rows, columns]; see Fp8Scheme.

        Raises:
            ValueError: If groups or packed integers do not divide the weight.
        """
        for length, unit, what in zip(shape, self.granule, ("outputs", "inputs"), strict=True):
            if length % unit:
                raise ValueError(
                    f"config.json: quantization_config ({self.packing}): a linear layer has {length} {what}, which is "
                    f"not a multiple of {unit}"
                )
        found = {
            suffix: TensorForm(
                tuple(-(-shape[dim] // self._unit(unit, shape[COLUMNS])) for dim, unit in axes),
                FLOATS if suffix in {INT4_SCALES, GPTQ_SCALES} else INT32,
            )
            for suffix, axes in self.axes.items()
        }
        unread = {
            Packing.COMPRESSED_TENSORS: {INT4_SHAPE: TensorForm((2,), INT64)},
            Packing.GPTQ: {GPTQ_GROUPS: TensorForm((shape[COLUMNS],), INT32)},  # checked before (group_order.py)
        }
        return found | unread.get(self.packing, {})

    def parts(self, part: Part) -> dict[str, Part]:
        """Return the parts of these tensors; see Fp8Scheme."""
        found: dict[str, Part] = {}
        for suffix, axes in self.axes.items():
            for place, (dim, unit) in enumerate(axes):
                size = unit or self.group
                if dim == part.dim and size:  # a row's only scale is replicated
                    found[suffix] = Part(place, tuple((start // size, end // size) for start, end in part.ranges))
        return found

    def num_bytes(self, shape: Shape) -> int:
        """Return the size of a weight [rows, columns] as a GPU multiplies it: two bytes per scale and zero point."""
        group = self.group or shape[COLUMNS]
        return self._num_bytes(shape, next((size for size in INT4_GROUPS if group % size == 0), group))

    def bytes_while_loading(self, shape: Shape, itemsize: int, *, of_experts: bool) -> int:
        """Return the size of a weight [rows, columns] that is rounded while it loads; `itemsize`: if it is not."""
        group, count = self.group_that_divides(shape[-1]), math.prod(shape)
        of_group = 4 if self.has_minimum(shape[-1]) and not of_experts else 2
        return count // 2 + count // group * of_group if group else count * itemsize

    def group_that_divides(self, inputs: int) -> int:
        """Return the largest group of the kernels, at most the scheme's, that divides `inputs`; 0: none does."""
        return next((size for size in INT4_GROUPS if size <= self.group and inputs % size == 0), 0)

    def has_minimum(self, inputs: int) -> bool:
        """Return whether a linear layer that is rounded while it loads has a minimum per group; experts have none."""
        return self.group_that_divides(inputs) == INT4_GROUP

    def bytes_in_groups(self, shape: Shape) -> int:
        """Return the size of a weight [rows, columns] as a CPU multiplies it: one scale per 32 columns."""
        return self._num_bytes(shape, INT4_GROUP)

    def _num_bytes(self, shape: Shape, group: int) -> int:
        return math.prod(shape) // 2 + math.prod(shape) // group * (4 if self.has_zeros else 2)

    def _unit(self, unit: int, columns: int) -> int:
        return unit or self.group or columns


Scheme = Fp8Scheme | Mxfp4Scheme | Int4Scheme


@dataclass(frozen=True, kw_only=True)
class FormatGroup:
    """Modules stored alike; patterns are regular expressions for whole module names."""

    scheme: Scheme
    modules: tuple[str, ...] = (".*",)

    def has(self, module: str) -> bool:
        return _matches(self.modules, module)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The format of a whole model."""

    name: str = ""  # used in messages; empty if all weights have 16 or 32 bits
    method: str = ""  # `quant_method` of config.json
    groups: tuple[FormatGroup, ...] = ()
    ignored: tuple[str, ...] = ()  # module patterns
    is_online: bool = False  # 16- or 32-bit weights are quantized while loading
    is_dequantized: bool = False  # dequantized while loading on every device
    in_groups: bool = False  # multiplied in 4 and 8 bits with scales per group of 32 inputs, on a CPU
    has_4_bits: bool = False  # of linear layers that are quantized to groups while loading; otherwise 8
    blocks: Path | None = None  # file of stored blocks; without it and `groups`, quantized while loading

    @property
    def kind(self) -> str:
        """`fp8`, `mxfp4` or `int4`, the kind of all schemes, or an empty string."""
        return self.groups[0].scheme.kind if self.groups else ""

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer by its module name; None: 16 or 32 bits."""
        if _matches(self.ignored, module):
            return None
        return next((group.scheme for group in self.groups if group.has(module)), None)

    def stored_scheme(self, module: str) -> Scheme | None:
        """Return the scheme of the checkpoint's tensors; None if weights are quantized online."""
        return None if self.is_online else self.scheme_of(module)


@cache
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile all patterns as one, because some checkpoints list hundreds of modules."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _matches(patterns: tuple[str, ...], module: str) -> bool:
    return bool(patterns) and _matcher(patterns).fullmatch(module) is not None


DENSE = WeightFormat()
ONLINE = WeightFormat(
    name="fp8, quantized while loading", groups=(FormatGroup(scheme=Fp8Scheme(per=ScalePer.ROW)),), is_online=True
)
INT8 = WeightFormat(name="int8 in groups of 32, quantized while loading", in_groups=True)
INT4 = WeightFormat(name="int4 in groups of 32, quantized while loading", in_groups=True, has_4_bits=True)
AS_STORED = WeightFormat(name="blocks of 4 and 8 bits of the GGUF file", in_groups=True)
AS_STORED_ON_GPUS = WeightFormat(name="blocks of 4 bits of the GGUF file")


def int4_while_loading(group: int) -> WeightFormat:
    """Return the format of weights that are rounded to 4-bit groups while they load, for GPUs.

    Groups are symmetric; those of 32 inputs, except in experts, have a minimum instead. A layer whose inputs `group`
    does not divide has the next smaller group of INT4_GROUPS, or stays in 16 bits.
    """
    scheme = Int4Scheme(packing=Packing.COMPRESSED_TENSORS, group=group, has_zeros=False)
    name = f"int4 in groups of {group}, quantized while loading"
    return WeightFormat(name=name, groups=(FormatGroup(scheme=scheme),), is_online=True)


_ROUNDED = {"int4": INT4, "int8": INT8}
STORED_BLOCKS = "stored_blocks.safetensors"  # next to the dequantized weights of a GGUF file


def check_method(stored: WeightFormat, quantization: str) -> None:
    """Check a checkpoint's method, if `--quantization` requires one.

    Raises:
        ValueError: If the checkpoint has another method, or none.
    """
    if quantization in METHODS and stored.method != quantization:
        raise ValueError(
            f"--quantization {quantization}: the checkpoint has {stored.name or 'no quantized'} weights; use auto, or "
            f"a checkpoint of {quantization}"
        )


def chosen_format(
    stored: WeightFormat, quantization: str, blocks: Path | None = None, int4_group: int = 0
) -> WeightFormat:
    """Return the format to serve.

    Args:
        stored: The checkpoint's format.
        quantization: Value of `--quantization`.
        blocks: The file of stored blocks, if any.
        int4_group: Inputs per scale of `int4` on a GPU; 0: the format is for a CPU.

    Raises:
        ValueError: If the checkpoint does not have the requested format.
    """
    check_method(stored, quantization)
    if quantization == "as-stored" and stored.kind == "int4":
        return replace(stored, in_groups=True)
    if quantization == "as-stored" and blocks is None:
        raise ValueError(
            f"--quantization as-stored needs 4-bit integers (compressed-tensors, gptq, awq), or {STORED_BLOCKS}, which "
            "the conversion of a quantized GGUF file writes; --quantization int8 and int4 quantize other weights while "
            "loading"
        )
    if quantization == "as-stored":
        return replace(AS_STORED_ON_GPUS if int4_group else AS_STORED, blocks=blocks)
    if quantization == "mxfp4" and stored.kind != "mxfp4":
        raise ValueError(
            f"--quantization mxfp4: the checkpoint has {stored.name or 'no quantized'} weights; use auto, or a "
            "checkpoint in MXFP4"
        )
    if quantization in _ROUNDED and stored.groups:
        raise ValueError(f"--quantization {quantization}: the checkpoint is {stored.name}; use auto or none")
    if quantization == "int4" and int4_group:
        return int4_while_loading(int4_group)
    if quantization in _ROUNDED:
        return _ROUNDED[quantization]
    if quantization == "none" and stored.groups:
        return replace(stored, is_dequantized=True)
    return ONLINE if quantization == "fp8" and not stored.groups else stored
