"""`--kv-cache-dtype auto` of a model: bfloat16 where it computes in float32 only because its products are of 4 and 8
bits, else the type that it computes in; and why (ADR 0158).

It is asked once, at a worker's start after `--quantization` is decided, and by estimates, the doctor and benchmarks. It
knows no tensor, and of the processor nothing: workers of one queue give keys and values one type.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_worker.execution.quantization_choice import chosen_quantization
from engine_worker.execution.settings import IN_GROUPS, ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory


@dataclass(frozen=True, kw_only=True)
class KVDtypeChoice:
    kv_cache_dtype: str  # one of KV_CACHE_DTYPES; auto: the type that the model computes in
    told: str = ""  # why, for the log; empty where there was nothing to choose


def chosen_kv_cache_dtype(settings: ExecutionSettings, saved: str) -> KVDtypeChoice:
    """`settings`: with the quantization that is used. `saved`: the type of the checkpoint's weights."""
    is_named = settings.kv_cache_dtype != "auto" or settings.dtype != "auto"
    if is_named or settings.quantization not in IN_GROUPS or saved == "float32":
        return KVDtypeChoice(kv_cache_dtype=settings.kv_cache_dtype)
    told = f"--kv-cache-dtype auto is bfloat16: half the bytes of float32, in which {settings.quantization} computes"
    return KVDtypeChoice(kv_cache_dtype="bfloat16", told=told)


def told_formats(settings: ExecutionSettings, device: str, why_no_kernels: Callable[[], str]) -> str:
    """Return what a worker would log of `auto`; arguments as of chosen_quantization()."""
    choice = chosen_quantization(settings, device, why_no_kernels)
    if choice.quantization not in IN_GROUPS:
        return choice.told
    try:
        saved = blueprint_from_directory(settings.model, settings.model_impl, choice.quantization).shape.dtype
    except ValueError:  # no such model is served, and who checks models says why
        return choice.told
    of_kv = chosen_kv_cache_dtype(replace(settings, quantization=choice.quantization), saved)
    return "; ".join(filter(None, (choice.told, of_kv.told)))
