"""Convert config.json's `quantization_config` to a WeightFormat: one file per writer; anything else is refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine_worker.model.quantization_config import awq, compressed_tensors, fine_grained, gptq, modelopt, mxfp4
from engine_worker.model.weight_format import DENSE, WeightFormat

READERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "awq": awq.weight_format,
    "compressed-tensors": compressed_tensors.weight_format,
    "fp8": fine_grained.weight_format,
    "gptq": gptq.weight_format,
    "modelopt": modelopt.weight_format,
    "mxfp4": mxfp4.weight_format,
}


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If the format is not supported.
    """
    written = config.get("quantization_config")
    if not written:
        return DENSE
    method = written.get("quant_method") if isinstance(written, dict) else written
    if not isinstance(method, str) or method not in READERS:
        raise ValueError(
            f"config.json: quantization_config ({method!r}) is not supported; supported: {', '.join(READERS)}, and "
            "unquantized weights"
        )
    return replace(READERS[method](written), method=method)


def refuse_quantized(config: Mapping[str, Any], quantization: str) -> None:
    """Refuse quantized weights, for models that run through transformers.

    Raises:
        ValueError: If the checkpoint is quantized, or quantization is requested.
    """
    why = "only natively implemented models support quantized weights"
    if config.get("quantization_config"):
        weight_format(config)  # an unsupported format gets its own error first
        raise ValueError(f"config.json: quantization_config is not supported with this model: {why}")
    if quantization not in {"auto", "none"}:
        raise ValueError(f"--quantization {quantization}: {why}")
