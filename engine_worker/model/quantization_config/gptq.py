"""`quant_method: gptq`, as AutoGPTQ and GPTQModel write it: 4-bit integers with a scale per group of inputs."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.weight_format import FormatGroup, Int4Scheme, Packing, WeightFormat

_CHECKPOINT_FORMATS = ("gptq", "gptq_v2")


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If the configuration is not supported.
    """
    bits, group = written.get("bits"), written.get("group_size")
    if bits != 4:
        raise _refused(f"bits = {bits!r}", "4")
    if not isinstance(group, int) or not (group == -1 or (group > 0 and group % 32 == 0)):
        raise _refused(f"group_size = {group!r}", "-1, or a multiple of 32")
    checkpoint_format = written.get("checkpoint_format") or "gptq"
    if checkpoint_format not in _CHECKPOINT_FORMATS:
        raise _refused(f"checkpoint_format = {checkpoint_format!r}", ", ".join(_CHECKPOINT_FORMATS))
    if written.get("dynamic"):
        raise _refused("dynamic (formats of single modules)", "one format for all modules")
    scheme = Int4Scheme(packing=Packing.GPTQ, group=max(group, 0), zeros_less_one=checkpoint_format == "gptq")
    groups = f"groups of {group}" if group > 0 else "a scale per row"
    ignored = () if written.get("lm_head") else ("lm_head",)
    return WeightFormat(name=f"gptq int4, {groups}", groups=(FormatGroup(scheme=scheme),), ignored=ignored)


def _refused(what: str, supported: str) -> ValueError:
    return ValueError(f"config.json: quantization_config (gptq) with {what} is not supported; supported: {supported}")
