"""Resolve `--quantization auto` for a model on a device, with the reason.

For a GGUF file and for 4-bit integers it is `as-stored` on a CPU with the C++ kernels, else `none`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.quantization_config import weight_format
from engine_worker.model.weight_format import STORED_BLOCKS
from shared.model_files import read_model_files


@dataclass(frozen=True, kw_only=True)
class QuantizationChoice:
    quantization: str  # one of QUANTIZATIONS
    reason: str = ""  # for the log; empty if there was no choice
    lacks_kernels: bool = False  # an operator can fix it


def chosen_quantization(
    settings: ExecutionSettings, device: str, why_no_kernels: Callable[[], str]
) -> QuantizationChoice:
    """Return the quantization of a model.

    Args:
        settings: Settings of the worker.
        device: `cpu` or `cuda`.
        why_no_kernels: Returns why the C++ kernels are missing, or an empty text. Called last; it may compile them.
    """
    if settings.quantization != "auto" or not (what := _in_groups(settings.model, device)):
        return QuantizationChoice(quantization=settings.quantization)
    if device != "cpu":
        reason = f"--quantization auto is none: {what} are dequantized to 16 bits while loading: no kernels on {device}"
        return QuantizationChoice(quantization="none", reason=reason)
    if wanted := _asked_for_more(settings):
        return QuantizationChoice(quantization="none", reason=f"--quantization auto is none: {wanted}")
    if lacking := why_no_kernels():
        return QuantizationChoice(
            quantization="none",
            reason="--quantization auto is none, which is slower: as-stored needs C++ kernels, which are missing: "
            f"{lacking}",
            lacks_kernels=True,
        )
    reason = f"--quantization auto is as-stored: linear layers use {what} directly"
    return QuantizationChoice(quantization="as-stored", reason=reason)


def _in_groups(directory: Path, device: str) -> str:
    """Return what the model has in groups of 4 or 8 bits; empty if it has nothing or the device needs no choice."""
    if device == "cpu" and (directory / STORED_BLOCKS).is_file():
        return "the GGUF file's 4- and 8-bit blocks"
    stored = weight_format(read_model_files(directory).config)
    return f"the 4-bit integers ({stored.name})" if stored.kind == "int4" else ""


def _asked_for_more(settings: ExecutionSettings) -> str:
    """Return why as-stored would break another option; empty if it would not."""
    if settings.dtype != "auto":
        return f"--dtype {settings.dtype} requires linear layers of that type"
    if settings.load_format == "dummy":
        return "--load-format dummy does not read the file"
    if settings.model_impl == "transformers":
        return "--model-impl transformers does not support it"
    if settings.tensor_parallel_size > 1:
        return "--tensor-parallel-size over 1 does not support it"
    return ""
