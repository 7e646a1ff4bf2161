"""How the weights of products are stored, as frozen values: which are fp8, and where their scales lie. Pure.

    WeightFormat   of a whole model: the scheme of each module, and those that stay in 16 bits
    Fp8Scheme      of some modules: weight = e4m3 * scale, with a scale for all of it, for each row or for each block

Read from a checkpoint by quantization_config/, or chosen by `--quantization`. Nothing here knows tensors or devices. It
is used at a worker's start and by estimates.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

# The tensors beside a product's `weight`, as they are called here; checkpoint.py knows what else they are called.
WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"

BLOCK = 128  # rows and columns of a weight that share a scale


class ScalePer(StrEnum):
    TENSOR = "tensor"
    ROW = "row"  # an output
    BLOCK = "block"  # of BLOCK rows and as many columns, those at the edges smaller


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    per: ScalePer
    has_input_scale: bool = False  # activations have one scale, too, that was measured beforehand

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """`rows`, `columns`: of the weight, or of a rank's part of it."""
        if self.per is ScalePer.TENSOR:
            return ()
        return (rows,) if self.per is ScalePer.ROW else (-(-rows // BLOCK), -(-columns // BLOCK))


@dataclass(frozen=True, kw_only=True)
class FormatGroup:
    """Modules that are stored alike. Patterns are regular expressions of whole names of modules."""

    scheme: Fp8Scheme
    modules: tuple[str, ...] = (".*",)

    def has(self, module: str) -> bool:
        return _matches(self.modules, module)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    name: str = ""  # as messages call it; empty where all weights are 16 or 32 bits
    groups: tuple[FormatGroup, ...] = ()
    ignored: tuple[str, ...] = ()  # patterns, as above
    is_online: bool = False  # the checkpoint has 16 or 32 bits; weights are quantized while they load
    is_dequantized: bool = False  # while they load, whatever the device multiplies
    in_groups: bool = False  # 4 and 8 bits, with scales for groups of 32 inputs: on a CPU
    blocks: Path | None = None  # of these: the file that has them; None where they are quantized while loading

    def scheme_of(self, module: str) -> Fp8Scheme | None:
        """`module`: the name of a product in the checkpoint, without `.weight`. None: it has 16 or 32 bits."""
        if _matches(self.ignored, module):
            return None
        return next((group.scheme for group in self.groups if group.has(module)), None)

    def stored_scheme(self, module: str) -> Fp8Scheme | None:
        """As scheme_of(), of the checkpoint's own tensors, which are not in fp8 where weights are quantized online."""
        return None if self.is_online else self.scheme_of(module)


@cache
def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One for all: some checkpoints list hundreds of modules."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _matches(patterns: tuple[str, ...], module: str) -> bool:
    return bool(patterns) and _matcher(patterns).fullmatch(module) is not None


DENSE = WeightFormat()
ONLINE = WeightFormat(
    name="fp8, quantized while loading", groups=(FormatGroup(scheme=Fp8Scheme(per=ScalePer.ROW)),), is_online=True
)
INT8 = WeightFormat(name="int8 in groups of 32, quantized while loading", in_groups=True)
AS_STORED = WeightFormat(name="blocks of 4 and 8 bits, as the GGUF file has them", in_groups=True)
STORED_BLOCKS = "stored_blocks.safetensors"  # beside the dequantized weights of a GGUF file


def chosen_format(stored: WeightFormat, quantization: str, blocks: Path | None = None) -> WeightFormat:
    """The format that a model is served in. `stored`: its checkpoint's; `quantization`: as `--quantization`.

    `blocks`: the file of stored blocks, if there is one. Raises ValueError where the checkpoint has not what is asked.
    """
    if quantization == "as-stored" and blocks is None:
        raise ValueError(
            f"--quantization as-stored: the model has no {STORED_BLOCKS}, which conversion makes of a GGUF file in "
            "Q4_0, Q4_1 or Q8_0; --quantization int8 quantizes other weights while loading"
        )
    if quantization == "as-stored":
        return replace(AS_STORED, blocks=blocks)
    if quantization == "int8" and stored.groups:
        raise ValueError(f"--quantization int8: the checkpoint has {stored.name}; auto and none are accepted")
    if quantization == "int8":
        return INT8
    if quantization == "none" and stored.groups:
        return replace(stored, is_dequantized=True)
    return ONLINE if quantization == "fp8" and not stored.groups else stored
