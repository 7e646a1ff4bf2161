"""`quant_method: awq`, as AutoAWQ writes it: 4-bit integers with zero points and scales per group of inputs."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import within
from engine_worker.model.weight_format import FormatGroup, Int4Scheme, Packing, WeightFormat


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If the configuration is not supported.
    """
    bits, group = written.get("bits"), written.get("group_size")
    if bits != 4:
        raise _refused(f"bits = {bits!r}", "4")
    if not isinstance(group, int) or group <= 0 or group % 32:
        raise _refused(f"group_size = {group!r}", "a multiple of 32")
    if (version := str(written.get("version", "gemm")).lower()) != "gemm":
        raise _refused(f"version = {version!r}", "gemm")
    if written.get("zero_point") is False:
        raise _refused("zero_point = False", "zero points")
    scheme = Int4Scheme(packing=Packing.AWQ, group=group)
    ignored = within(written.get("modules_to_not_convert"), "modules_to_not_convert")
    group_of_all = FormatGroup(scheme=scheme)
    return WeightFormat(name=f"awq int4, groups of {group}", groups=(group_of_all,), ignored=("lm_head", *ignored))


def _refused(what: str, supported: str) -> ValueError:
    return ValueError(f"config.json: quantization_config (awq) with {what} is not supported; supported: {supported}")
