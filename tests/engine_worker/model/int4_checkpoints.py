"""Tiny checkpoints of 4-bit integers in every supported layout, and the same models in float32, multiplied out.

Each layout is packed by plain loops from its writer's definition:
    compressed-tensors   pack_quantized/helpers.py: eight numbers along a dimension, lowest bits first, plus 8
    GPTQ                 AutoGPTQ's QuantLinear.pack(): eight inputs per int32, zero points minus one in version 1
    AWQ                  AutoAWQ's WQLinear_GEMM.from_linear(): eight outputs per int32 in the order 0 2 4 6 1 3 5 7
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case

IN_ORDER, AWQ_ORDER = range(8), (0, 2, 4, 6, 1, 3, 5, 7)
LLAMA = Case("llama", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "attention_bias": True})  # fmt: skip
PHI3 = Case("phi3", {"hidden_size": 256, "intermediate_size": 128, "head_dim": None, "num_attention_heads": 4,
                     "num_key_value_heads": 2})  # fmt: skip

QWEN3_MOE = Case("qwen3_moe", {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4,
                               "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 64})  # fmt: skip


@dataclass(frozen=True)
class Numbers:
    values: Tensor  # [N, K] int32, 0 to 15
    zeros: Tensor  # [N, groups] int32
    scales: Tensor  # [N, groups]

    def exact(self) -> Tensor:
        repeats = self.values.shape[1] // self.scales.shape[1]
        zeros, scales = (each.repeat_interleave(repeats, 1) for each in (self.zeros, self.scales.float()))
        return (self.values - zeros).float() * scales


@dataclass(frozen=True)
class Layout:
    config: Mapping[str, Any]
    store: Callable[[Numbers], dict[str, Tensor]]  # tensors by what is added to the module's name
    group: int  # 0: a row
    has_zeros: bool = True
    scale_dtype: torch.dtype = torch.float16


@dataclass(frozen=True)
class Int4Model:
    directory: Path
    exact: Path
    layout: Layout


def packed(numbers: Tensor, dim: int, order: Any = IN_ORDER) -> Tensor:
    """Pack eight int32 numbers along a dimension into one."""
    pieces = numbers.unflatten(dim, (-1, 8)).unbind(dim + 1)
    words = torch.zeros_like(pieces[0], dtype=torch.int64)
    for place, number in enumerate(order):
        words |= pieces[number].long() << 4 * place
    return words.where(words < 2**31, words - 2**32).int().contiguous()


def as_compressed_tensors(numbers: Numbers, *, has_zeros: bool) -> dict[str, Tensor]:
    found = {
        ".weight_packed": packed(numbers.values, 1),
        ".weight_scale": numbers.scales,
        ".weight_shape": torch.tensor(numbers.values.shape),
    }
    return found | ({".weight_zero_point": packed(numbers.zeros, 0)} if has_zeros else {})


def as_gptq(numbers: Numbers, *, less: int) -> dict[str, Tensor]:
    columns, groups = numbers.values.shape[1], numbers.scales.shape[1]
    return {
        ".qweight": packed(numbers.values.T, 0),
        ".qzeros": packed((numbers.zeros.T - less) & 15, 1),
        ".scales": numbers.scales.T.contiguous(),
        ".g_idx": (torch.arange(columns) // (columns // groups)).int(),
    }


def as_awq(numbers: Numbers) -> dict[str, Tensor]:
    return {
        ".qweight": packed(numbers.values.T, 1, AWQ_ORDER),
        ".qzeros": packed(numbers.zeros.T, 1, AWQ_ORDER),
        ".scales": numbers.scales.T.contiguous(),
    }


def compressed(group: int, *, symmetric: bool, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | others, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def gptq(group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group or -1, "desc_act": False, "sym": True, **others}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def _compressed_layout(group: int, *, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Layout:
    def store(numbers: Numbers) -> dict[str, Tensor]:
        return as_compressed_tensors(numbers, has_zeros=not symmetric)

    return Layout(compressed(group, symmetric=symmetric), store, group, not symmetric, dtype)


LAYOUTS = {
    "compressed-tensors, groups of 128": _compressed_layout(128, symmetric=True),
    "compressed-tensors, groups of 32": _compressed_layout(32, symmetric=True, dtype=torch.float32),
    "compressed-tensors, rows": _compressed_layout(0, symmetric=True),
    "compressed-tensors, zero points": _compressed_layout(64, symmetric=False),
    "compressed-tensors, rows, zero points": _compressed_layout(0, symmetric=False),
    "gptq": Layout(gptq(128), lambda numbers: as_gptq(numbers, less=1), 128, has_zeros=False),
    "gptq, zero points": Layout(gptq(64, sym=False), lambda numbers: as_gptq(numbers, less=1), 64),
    "gptq, rows": Layout(gptq(0), lambda numbers: as_gptq(numbers, less=1), 0),
    "gptq, version 2": Layout(
        gptq(32, checkpoint_format="gptq_v2"), lambda numbers: as_gptq(numbers, less=0), 32, scale_dtype=torch.bfloat16
    ),
    "awq": Layout(AWQ, as_awq, 64),
}


def write_int4(
    directory: Path,
    layout: Layout,
    case: Case = LLAMA,
    is_int4: Callable[[str], bool] = lambda module: module.endswith("_proj"),
) -> Int4Model:
    """Write the checkpoint; `is_int4` selects the quantized modules."""
    exact, quantized = write_family(directory / "exact", case), directory / "int4"
    stored: dict[str, Tensor] = {}
    multiplied: dict[str, Tensor] = {}
    for name, weight in load_file(exact / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and is_int4(module):
            numbers = quantized_numbers(weight, layout)
            stored |= {module + suffix: tensor for suffix, tensor in layout.store(numbers).items()}
            multiplied[name] = numbers.exact()
        else:
            stored[name] = multiplied[name] = weight
    save_file(multiplied, exact / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((exact / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    return Int4Model(quantized, exact, layout)


def quantized_numbers(weight: Tensor, layout: Layout) -> Numbers:
    groups = weight.unflatten(1, (-1, layout.group or weight.shape[1]))
    if layout.has_zeros:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).to(layout.scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(2) / 7).to(layout.scale_dtype)
        zeros = torch.full_like(scales, 8.0, dtype=torch.float32)
    values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return Numbers(values.flatten(1).int(), zeros.int(), scales)
