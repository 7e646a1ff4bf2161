"""NVIDIA's modelopt (the `-FP8` models): `hf_quant_config.json`, or the same inside config.json."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import wildcards
from engine_worker.model.weight_format import FormatGroup, Fp8Scheme, ScalePer, WeightFormat

_SCHEMES = {
    "FP8": Fp8Scheme(per=ScalePer.TENSOR, has_input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(per=ScalePer.ROW),
}


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If quant_algo is not supported.
    """
    inner = written.get("quantization")
    found = inner if isinstance(inner, dict) else written
    algorithm = str(found.get("quant_algo"))
    if algorithm not in _SCHEMES:
        raise ValueError(
            f"config.json: quantization_config (modelopt) with quant_algo = {algorithm!r} is not supported; supported: "
            + ", ".join(_SCHEMES)
        )
    excluded = [*wildcards(found.get("exclude_modules"), "exclude_modules"), *wildcards(found.get("ignore"), "ignore")]
    group = FormatGroup(scheme=_SCHEMES[algorithm])
    return WeightFormat(name=f"modelopt {algorithm}", groups=(group,), ignored=("lm_head", *excluded))
