"""`--quantization auto` of a model on a device: `as-stored` where a CPU has a GGUF file's blocks and the C++
kernels that multiply them, else `none`, and why.

It is asked once, at a worker's start before a weight is read, and by estimates. It knows no tensor and no kernel:
whether there are kernels says a function that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.weight_format import STORED_BLOCKS


@dataclass(frozen=True, kw_only=True)
class QuantizationChoice:
    quantization: str  # one of QUANTIZATIONS
    told: str = ""  # why, for the log; empty where there was nothing to choose
    lacks_kernels: bool = False  # whoever runs the machine can mend it


def chosen_quantization(
    settings: ExecutionSettings, device: str, why_no_kernels: Callable[[], str]
) -> QuantizationChoice:
    """`device`: `cpu` or `cuda`. `why_no_kernels`: empty where there are; asked last, for it may compile them."""
    if settings.quantization != "auto" or device != "cpu" or not (settings.model / STORED_BLOCKS).is_file():
        return QuantizationChoice(quantization=settings.quantization)
    if wanted := _asked_for_more(settings):
        return QuantizationChoice(quantization="none", told=f"--quantization auto is none: {wanted}")
    if lacking := why_no_kernels():
        return QuantizationChoice(
            quantization="none",
            told="--quantization auto is none, slower: as-stored is multiplied by C++ kernels, and there are none: "
            f"{lacking}",
            lacks_kernels=True,
        )
    told = "--quantization auto is as-stored: the GGUF file's blocks of 4 and 8 bits are multiplied as they lie there"
    return QuantizationChoice(quantization="as-stored", told=told)


def _asked_for_more(settings: ExecutionSettings) -> str:
    """The option that a model in blocks would not keep; empty where there is none."""
    if settings.dtype != "auto":
        return f"--dtype {settings.dtype} asks for products of that type"
    if settings.load_format == "dummy":
        return "--load-format dummy reads no blocks"
    if settings.model_impl == "transformers":
        return "--model-impl transformers multiplies no blocks"
    if settings.tensor_parallel_size > 1:
        return "blocks are not divided among ranks"
    return ""
