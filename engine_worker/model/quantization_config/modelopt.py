"""NVIDIA's modelopt: `hf_quant_config.json` beside config.json, or the same within it (nvidia's `-FP8`).

It is used at a worker's start and by estimates. It knows no tensors.
"""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import wildcards
from engine_worker.model.weight_format import FormatGroup, Fp8Scheme, ScalePer, WeightFormat

_SCHEMES = {
    "FP8": Fp8Scheme(per=ScalePer.TENSOR, has_input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(per=ScalePer.ROW),
}


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Raises ValueError."""
    inner = written.get("quantization")
    told = inner if isinstance(inner, dict) else written
    algorithm = str(told.get("quant_algo"))
    if algorithm not in _SCHEMES:
        raise ValueError(
            f"config.json: quantization_config (modelopt) with quant_algo = {algorithm!r} is not supported; read are "
            + ", ".join(_SCHEMES)
        )
    excluded = [*wildcards(told.get("exclude_modules"), "exclude_modules"), *wildcards(told.get("ignore"), "ignore")]
    group = FormatGroup(scheme=_SCHEMES[algorithm])
    return WeightFormat(name=f"modelopt {algorithm}", groups=(group,), ignored=("lm_head", *excluded))
