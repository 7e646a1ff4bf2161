"""Resolve `--kv-cache-dtype auto` for a model, with the reason (ADR 0158).

It is bfloat16 if the model computes in float32 only because its linear layers have 4- or 8-bit weights, else the
model's own type. It does not depend on the processor, because all workers of a queue use one type.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_worker.execution.load.quantization_choice import chosen_quantization
from engine_worker.execution.settings import IN_GROUPS, ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory


@dataclass(frozen=True, kw_only=True)
class KVDtypeChoice:
    kv_cache_dtype: str  # one of KV_CACHE_DTYPES; auto: the model's compute type
    reason: str = ""  # for the log; empty if there was no choice


def chosen_kv_cache_dtype(settings: ExecutionSettings, saved: str) -> KVDtypeChoice:
    """Return the type of the KV cache.

    Args:
        settings: Settings in which the quantization is resolved.
        saved: Type of the checkpoint's weights.
    """
    is_named = settings.kv_cache_dtype != "auto" or settings.dtype != "auto"
    is_on_cpu = settings.device != "cuda" and settings.quantization in IN_GROUPS
    if is_named or not is_on_cpu or saved == "float32":
        return KVDtypeChoice(kv_cache_dtype=settings.kv_cache_dtype)
    reason = f"--kv-cache-dtype auto is bfloat16: half the bytes of float32, in which {settings.quantization} computes"
    return KVDtypeChoice(kv_cache_dtype="bfloat16", reason=reason)


def describe_formats(settings: ExecutionSettings, device: str, why_no_kernels: Callable[[], str]) -> str:
    """Return a worker's log text about its `auto` formats; arguments as of chosen_quantization()."""
    choice = chosen_quantization(settings, device, why_no_kernels)
    if choice.quantization not in IN_GROUPS:
        return choice.reason
    try:
        saved = blueprint_from_directory(settings.model, settings.model_impl, choice.quantization).shape.dtype
    except ValueError:  # the model check reports the cause
        return choice.reason
    of_kv = chosen_kv_cache_dtype(replace(settings, quantization=choice.quantization, device=device), saved)
    return "; ".join(filter(None, (choice.reason, of_kv.reason)))
