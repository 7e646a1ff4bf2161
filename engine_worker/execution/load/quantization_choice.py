"""Resolve `--quantization auto` for a model on a device, with the reason.

It is `as-stored` for a GGUF file; on a CPU with the C++ kernels also for 4-bit integers. Otherwise it is `none`, or on
a GPU the checkpoint's format.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.quantization_config import weight_format
from engine_worker.model.weight_format import METHODS, STORED_BLOCKS, check_method
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
    is_auto = settings.quantization in {"auto", *METHODS}
    if not is_auto or not (what := _in_groups(settings, device)):
        return QuantizationChoice(quantization=settings.quantization)
    if wanted := _asked_for_more(settings, device):
        return QuantizationChoice(quantization="none", reason=f"--quantization auto is none: {wanted}")
    if device == "cpu" and (lacking := why_no_kernels()):
        return QuantizationChoice(
            quantization="none",
            reason="--quantization auto is none, which is slower: as-stored needs C++ kernels, which are missing: "
            f"{lacking}",
            lacks_kernels=True,
        )
    reason = f"--quantization auto is as-stored: linear layers use {what} directly"
    return QuantizationChoice(quantization="as-stored", reason=reason)


def _in_groups(settings: ExecutionSettings, device: str) -> str:
    """Return what the model has in groups of 4 or 8 bits and the device multiplies, or an empty string."""
    if settings.quantization == "auto" and (settings.model / STORED_BLOCKS).is_file():
        return f"the GGUF file's {'4- and 8-bit' if device == 'cpu' else '4-bit'} blocks"
    if device != "cpu":
        return ""
    stored = weight_format(read_model_files(settings.model).config)
    check_method(stored, settings.quantization)
    return f"the 4-bit integers ({stored.name})" if stored.kind == "int4" else ""


def _asked_for_more(settings: ExecutionSettings, device: str) -> str:
    """Return why as-stored would break another option; empty if it would not."""
    allowed = ("auto",) if device == "cpu" else ("auto", "bfloat16")
    if settings.dtype not in allowed:
        return f"--dtype {settings.dtype} requires linear layers of that type"
    if settings.load_format == "dummy":
        return "--load-format dummy does not read the file"
    if settings.model_impl == "transformers":
        return "--model-impl transformers does not support it"
    if settings.tensor_parallel_size > 1:
        return "--tensor-parallel-size over 1 does not support it"
    return ""
