"""`quant_method: mxfp4`, as gpt-oss is published: experts in MXFP4, all other modules listed as unquantized."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import wildcards
from engine_worker.model.weight_format import FormatGroup, Mxfp4Scheme, WeightFormat

_KEYS = {"quant_method", "modules_to_not_convert", "dequantize"}


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If the configuration has keys that MXFP4 does not define.
    """
    if unknown := sorted(written.keys() - _KEYS):
        raise ValueError(
            f"config.json: quantization_config (mxfp4) with {unknown[0]} is not supported; supported keys: "
            + ", ".join(sorted(_KEYS))
        )
    ignored = wildcards(written.get("modules_to_not_convert"), "modules_to_not_convert")
    group = FormatGroup(scheme=Mxfp4Scheme(), modules=(r".*\.experts\..*",))
    return WeightFormat(name="mxfp4", groups=(group,), ignored=("lm_head", *ignored))
