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

FLOATS = ("F32", "F16", "BF16")  # safetensors' notation
FP8, BYTES = ("F8_E4M3",), ("U8",)


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


Scheme = Fp8Scheme | Mxfp4Scheme


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
    groups: tuple[FormatGroup, ...] = ()
    ignored: tuple[str, ...] = ()  # module patterns
    is_online: bool = False  # 16- or 32-bit weights are quantized while loading
    is_dequantized: bool = False  # dequantized while loading on every device
    in_groups: bool = False  # 4 and 8 bits with scales per group of 32 inputs, on a CPU
    blocks: Path | None = None  # file of stored blocks; None: quantized while loading

    @property
    def kind(self) -> str:
        """`fp8` or `mxfp4`, the kind of all schemes, or an empty string."""
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
AS_STORED = WeightFormat(name="blocks of 4 and 8 bits, as the GGUF file has them", in_groups=True)
STORED_BLOCKS = "stored_blocks.safetensors"  # next to the dequantized weights of a GGUF file


def chosen_format(stored: WeightFormat, quantization: str, blocks: Path | None = None) -> WeightFormat:
    """Return the format to serve.

    Args:
        stored: The checkpoint's format.
        quantization: Value of `--quantization`.
        blocks: The file of stored blocks, if any.

    Raises:
        ValueError: If the checkpoint does not have the requested format.
    """
    if quantization == "as-stored" and blocks is None:
        raise ValueError(
            f"--quantization as-stored needs {STORED_BLOCKS}, which the conversion of a GGUF file writes for "
            "Q4_0, Q4_1 and Q8_0; --quantization int8 quantizes other weights while loading"
        )
    if quantization == "as-stored":
        return replace(AS_STORED, blocks=blocks)
    if quantization == "mxfp4" and stored.kind != "mxfp4":
        raise ValueError(
            f"--quantization mxfp4: the checkpoint has {stored.name or 'no quantized'} weights; use auto, or a "
            "checkpoint in MXFP4"
        )
    if quantization == "int8" and stored.groups:
        raise ValueError(f"--quantization int8: the checkpoint is {stored.name}; use auto or none")
    if quantization == "int8":
        return INT8
    if quantization == "none" and stored.groups:
        return replace(stored, is_dequantized=True)
    return ONLINE if quantization == "fp8" and not stored.groups else stored
