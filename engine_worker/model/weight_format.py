"""How the weights of linear layers are stored, as frozen values: which are fp8, and where their scales are.

A format is read from a checkpoint by quantization_config/, or chosen by `--quantization`.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

# Suffixes of the tensors beside a layer's `weight`; checkpoint.py maps other names to them.
WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"

BLOCK = 128  # rows and columns per scale


class ScalePer(StrEnum):
    """What one scale covers."""

    TENSOR = "tensor"
    ROW = "row"  # one output
    BLOCK = "block"  # BLOCK rows and columns; smaller at the edges


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """An fp8 weight: e4m3 * scale."""

    per: ScalePer
    has_input_scale: bool = False  # activations have one static scale

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight, or of a rank's part of it."""
        if self.per is ScalePer.TENSOR:
            return ()
        return (rows,) if self.per is ScalePer.ROW else (-(-rows // BLOCK), -(-columns // BLOCK))


@dataclass(frozen=True, kw_only=True)
class FormatGroup:
    """Modules stored alike; patterns are regular expressions for whole module names."""

    scheme: Fp8Scheme
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

    def scheme_of(self, module: str) -> Fp8Scheme | None:
        """Return the scheme of a linear layer by its module name; None: 16 or 32 bits."""
        if _matches(self.ignored, module):
            return None
        return next((group.scheme for group in self.groups if group.has(module)), None)

    def stored_scheme(self, module: str) -> Fp8Scheme | None:
        """Return the scheme of the checkpoint's tensors, which are not fp8 if weights are quantized online."""
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
    if quantization == "int8" and stored.groups:
        raise ValueError(f"--quantization int8: the checkpoint is {stored.name}; use auto or none")
    if quantization == "int8":
        return INT8
    if quantization == "none" and stored.groups:
        return replace(stored, is_dequantized=True)
    return ONLINE if quantization == "fp8" and not stored.groups else stored
