"""config.json's `quantization_config` -> WeightFormat: a file for each writer, and a refusal for all else.

It is used once, at a worker's start, and by estimates. It knows no tensors: whether they are there is checked with the
names and shapes of checkpoint_tensors.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from engine_worker.model.quantization_config import compressed_tensors, fine_grained, modelopt
from engine_worker.model.weight_format import DENSE, WeightFormat

READERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "compressed-tensors": compressed_tensors.weight_format,
    "fp8": fine_grained.weight_format,
    "modelopt": modelopt.weight_format,
}


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """Raises ValueError with the format that is not read, and those that are."""
    written = config.get("quantization_config")
    if not written:
        return DENSE
    method = written.get("quant_method") if isinstance(written, dict) else written
    if not isinstance(method, str) or method not in READERS:
        raise ValueError(
            f"config.json: quantization_config ({method!r}) is not supported; fp8 weights of {', '.join(READERS)} are "
            "read, and unquantized ones"
        )
    return READERS[method](written)


def refuse_quantized(config: Mapping[str, Any], quantization: str) -> None:
    """For networks of transformers: raises ValueError where weights are quantized, or are to be."""
    why = "only models with an implementation of their own here have quantized weights"
    if config.get("quantization_config"):
        weight_format(config)  # the sentence of a format that no model has comes first
        raise ValueError(f"config.json: quantization_config is not supported with this model: {why}")
    if quantization in {"fp8", "int8", "as-stored"}:
        raise ValueError(f"--quantization {quantization}: {why}")
