"""Tiny fp8 checkpoints in every supported layout, and the same models in float32 with e4m3 * scale multiplied out.

    write_fp8(directory, layout)   from a random model; `exact` is the float32 model, as transformers reads it

Each layout is written by hand as its writer does, so that every name, shape and type of a scale can be tested
(test_fp8_writers.py uses compressed-tensors itself).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case

FP8, MOST, BLOCK = torch.float8_e4m3fn, 448.0, 128

# The width is not a multiple of a block, so the last blocks are smaller; fused projections have whole blocks.
LLAMA = Case("llama", {"hidden_size": 160, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "attention_bias": True})  # fmt: skip
PHI3 = Case("phi3", {"hidden_size": 256, "intermediate_size": 160, "head_dim": None, "num_attention_heads": 4,
                     "num_key_value_heads": 2})  # fmt: skip


@dataclass(frozen=True)
class Fp8Model:
    directory: Path
    exact: Path


@dataclass(frozen=True)
class Layout:
    config: Mapping[str, Any]  # quantization_config of config.json
    quantize: Callable[[Tensor], Tensor]  # [N, K] -> scales as stored
    scale_name: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    input_scale: str = ""
    file: str = "config.json"  # file that holds `config`
    others: tuple[str, ...] = field(default=())  # tensors of each layer that are not weights


def of_rows(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / MOST


def of_all(weight: Tensor) -> Tensor:
    return weight.abs().max() / MOST


def of_all_in_a_list(weight: Tensor) -> Tensor:
    return of_all(weight)[None]


def of_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scale[row, column] = block.abs().max() / MOST
    return scale


def spread(scale: Tensor, shape: tuple[int, int], is_blocks: bool) -> Tensor:
    """Return the scale of each element of a weight."""
    if not is_blocks:
        return scale.float().expand(shape)
    return scale.float()[torch.arange(shape[0])[:, None] // BLOCK, torch.arange(shape[1])[None] // BLOCK]


def compressed(strategy: str, inputs: Mapping[str, Any], **weights: Any) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": {**common, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


PER_TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
PER_GROUP = {"strategy": "group", "dynamic": True, "group_size": 128}
ROWS = Layout(compressed("channel", PER_TOKEN), of_rows)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}

LAYOUTS: dict[str, Layout] = {
    "compressed-tensors, rows": ROWS,
    "compressed-tensors, rows, bfloat16": Layout(compressed("channel", PER_TOKEN), of_rows, scale_dtype=torch.bfloat16),
    "compressed-tensors, tensors": Layout(compressed("tensor", PER_TOKEN), of_all_in_a_list),
    "compressed-tensors, tensors, static": Layout(
        compressed("tensor", STATIC), of_all_in_a_list, input_scale="input_scale",
        others=("self_attn.k_scale", "self_attn.v_scale"),
    ),
    "compressed-tensors, blocks": Layout(compressed("block", PER_GROUP, block_structure=[128, 128]), of_blocks),
    "fp8, blocks": Layout(BLOCKS, of_blocks, "weight_scale_inv"),
    "fp8, blocks, bfloat16": Layout(BLOCKS, of_blocks, "weight_scale_inv", torch.bfloat16),
    "fp8, tensors": Layout({**AUTO_FP8, "activation_scheme": "dynamic"}, of_all),
    "fp8, tensors, static": Layout(AUTO_FP8, of_all, input_scale="input_scale", others=("self_attn.kv_scale",)),
    "fp8, tensors of transformers, static": Layout(
        {**AUTO_FP8, "weight_block_size": None, "modules_to_not_convert": ["lm_head"]}, of_all, "weight_scale_inv",
        input_scale="activation_scale",
    ),
    "modelopt": Layout(
        {"quant_method": "modelopt", **MODELOPT}, of_all, input_scale="input_scale",
        others=("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ),
    "modelopt, a file of its own": Layout(
        {"producer": {"name": "modelopt"}, "quantization": MODELOPT}, of_all, input_scale="input_scale",
        file="hf_quant_config.json",
    ),
}  # fmt: skip


def write_fp8(
    directory: Path,
    layout: Layout,
    case: Case = LLAMA,
    is_fp8: Callable[[str], bool] = lambda module: module.endswith("_proj"),
) -> Fp8Model:
    """Write the checkpoint; `is_fp8` selects the quantized modules."""
    exact, quantized = write_family(directory / "exact", case), directory / "fp8"
    stored: dict[str, Tensor] = {}
    multiplied: dict[str, Tensor] = {}
    for name, weight in load_file(exact / "model.safetensors").items():
        stored[name] = multiplied[name] = weight
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and is_fp8(module):
            tensors = quantized_tensors(module, weight, layout)
            stored |= tensors
            multiplied[name] = exact_weight(tensors, module, layout)
    for index in range(3):
        stored |= {
            f"model.layers.{index}.{name}": torch.tensor(0.25 if ".v_" in name else 0.5) for name in layout.others
        }
    save_file(multiplied, exact / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((exact / "config.json").read_text())
    if layout.file == "config.json":
        config["quantization_config"] = layout.config
    else:
        (quantized / layout.file).write_text(json.dumps(layout.config))
    (quantized / "config.json").write_text(json.dumps(config))
    return Fp8Model(quantized, exact)


def quantized_tensors(module: str, weight: Tensor, layout: Layout) -> dict[str, Tensor]:
    scale = layout.quantize(weight).to(layout.scale_dtype)
    rows, columns = weight.shape
    values = weight / spread(scale, (rows, columns), layout.quantize is of_blocks)
    tensors = {f"{module}.weight": values.clamp(-MOST, MOST).to(FP8), f"{module}.{layout.scale_name}": scale.clone()}
    if layout.input_scale:
        factor = torch.tensor(0.25 if "k_proj" in module else 0.125)
        tensors[f"{module}.{layout.input_scale}"] = factor[None] if layout.quantize is of_all_in_a_list else factor
    return tensors


def exact_weight(tensors: Mapping[str, Tensor], module: str, layout: Layout) -> Tensor:
    weight = tensors[f"{module}.weight"].float()
    rows, columns = weight.shape
    scale = tensors[f"{module}.{layout.scale_name}"]
    return weight * spread(scale, (rows, columns), layout.quantize is of_blocks)
