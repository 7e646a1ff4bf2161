"""compressed-tensors, as llm-compressor writes it: RedHatAI's `-FP8-dynamic`, `-FP8`, `-FP8-BLOCK` and `.w4a16`.

Supported are W8A8 in fp8: e4m3 weights with a scale per tensor, row or block of 128 x 128, and inputs quantized at run
time or with a static scale; and W4A16: 4-bit integers with a scale per group of inputs or row.
"""

from collections.abc import Mapping
from typing import Any

from engine_worker.model.quantization_config.patterns import exact_or_regex
from engine_worker.model.weight_format import (
    BLOCK,
    INT4_GROUP,
    FormatGroup,
    Fp8Scheme,
    Int4Scheme,
    Packing,
    ScalePer,
    Scheme,
    WeightFormat,
)

_PER = {"tensor": ScalePer.TENSOR, "channel": ScalePer.ROW, "block": ScalePer.BLOCK}
_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized", None)
_ACCEPTED = (
    "; supported: 8-bit floats (e4m3) with a scale per tensor, channel or block of 128 x 128, and 4-bit integers with "
    "a scale per channel or group, whose size is a multiple of 32"
)


def weight_format(written: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format.

    Raises:
        ValueError: If it is not W8A8 in fp8 or W4A16 with such scales.
    """
    for part in (written, *_groups(written)):
        if part.get("format") not in _FORMATS:
            raise _refused(f"format = {part['format']!r}")
    for key in ("transform_config", "sparsity_config"):
        content = written.get(key) or {}
        if content and content.get("format") != "dense":
            raise _refused(f"{key} = {content!r:.80}")
    groups = tuple(_group(group) for group in _groups(written))
    kinds = sorted({group.scheme.kind for group in groups})
    if len(kinds) > 1:
        raise _refused(" and ".join(kinds))
    ignored = exact_or_regex(written.get("ignore"), "ignore")
    return WeightFormat(name=f"compressed-tensors {kinds[0]}", groups=groups, ignored=ignored)


def _groups(written: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = written.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise _refused(f"config_groups = {groups!r:.80}")
    return list(groups.values())


def _group(group: Mapping[str, Any]) -> FormatGroup:
    targets = exact_or_regex(group.get("targets"), "targets")
    modules = tuple(".*" if target == "Linear" else target for target in targets)
    return FormatGroup(
        scheme=_scheme(group.get("weights") or {}, group.get("input_activations") or {}), modules=modules
    )


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme:
    return _int4_scheme(weights, inputs) if weights.get("type") == "int" else _fp8_scheme(weights, inputs)


def _int4_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Int4Scheme:
    if weights.get("num_bits") != 4:
        raise _refused(f"weights of {weights.get('num_bits')} bits (int)")
    if inputs:
        raise _refused(f"input_activations of {inputs.get('num_bits')} bits beside weights of 4 bits")
    if weights.get("actorder") in {"group", True}:
        raise _refused("actorder 'group', which reorders inputs between groups,")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    is_group = strategy == "group" and isinstance(size, int) and size > 0 and size % INT4_GROUP == 0
    if not is_group and strategy != "channel":
        raise _refused(f"weights with strategy {strategy!r}" + (f" and group_size {size}" if size else ""))
    has_zeros = weights.get("symmetric") is False
    return Int4Scheme(packing=Packing.COMPRESSED_TENSORS, group=int(size or 0) if is_group else 0, has_zeros=has_zeros)


def _fp8_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Fp8Scheme:
    for what, given in (("weights", weights), ("input_activations", inputs)):
        if (given.get("type"), given.get("num_bits")) != ("float", 8) or given.get("symmetric") is False:
            bits, kind = given.get("num_bits"), given.get("type")
            raise _refused(f"{what} of {bits} bits ({kind})" if given else f"no {what}")
    per, block = _PER.get(str(weights.get("strategy"))), weights.get("block_structure")
    if per is None or (per is ScalePer.BLOCK and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")):
        raise _refused(f"weights with strategy {weights.get('strategy')!r}" + (f" of {block}" if block else ""))
    is_static = inputs.get("dynamic") is False
    if is_static and inputs.get("strategy") != "tensor":
        raise _refused(f"input_activations that are static with strategy {inputs.get('strategy')!r}")
    return Fp8Scheme(per=per, has_input_scale=is_static)


def _refused(what: str) -> ValueError:
    return ValueError(f"config.json: quantization_config (compressed-tensors) with {what} is not supported{_ACCEPTED}")
