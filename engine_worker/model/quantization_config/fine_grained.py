"""`quant_method: fp8`: scales per block of 128 x 128, as most publishers use, or per tensor (AutoFP8)."""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import within
from engine_worker.model.weight_format import BLOCK, FormatGroup, Fp8Scheme, ScalePer, WeightFormat

_ACCEPTED = (
    "; supported: e4m3 with weight_block_size [128, 128] and activation_scheme dynamic, or with a scale per tensor "
    "and activation_scheme static or dynamic"
)


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If the configuration is not supported.
    """
    block, scheme = written.get("weight_block_size"), str(written.get("activation_scheme", "dynamic"))
    if str(written.get("fmt", "e4m3")) not in {"e4m3", "float8_e4m3fn"}:
        raise _refused(f"fmt = {written['fmt']!r}")
    if block not in (None, [BLOCK, BLOCK]):
        raise _refused(f"weight_block_size = {block!r}")
    if scheme not in {"dynamic", "static"} or (block and scheme == "static"):
        raise _refused(f"activation_scheme = {scheme!r}" + (" and blocks" if block else ""))
    per = ScalePer.BLOCK if block else ScalePer.TENSOR
    # The head is in 16 bits even if the file does not say so: neither writer converts it.
    ignored = ("lm_head", *_ignored(written, "ignored_layers"), *_ignored(written, "modules_to_not_convert"))
    group = FormatGroup(scheme=Fp8Scheme(per=per, has_input_scale=scheme == "static"))
    return WeightFormat(name=f"fp8, a scale per {'128 x 128' if block else 'tensor'}", groups=(group,), ignored=ignored)


def _ignored(written: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return within(written.get(key), key)


def _refused(what: str) -> ValueError:
    return ValueError(f"config.json: quantization_config (fp8) with {what} is not supported{_ACCEPTED}")
