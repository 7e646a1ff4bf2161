"""Tiny fp8 checkpoints in every layout that is read, and the same models in float32: e4m3 * scale, multiplied out.

write_fp8(directory, layout)   from random weights; the float32 model, as transformers writes it, is its `exact`
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_worker.execution.reference import write_model

FP8, MOST, BLOCK = torch.float8_e4m3fn, 448.0, 128
PRODUCTS = ("_proj.weight",)

# A width and an inner width that are no multiples of a block: the last blocks are smaller.
CHANGES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_attention_heads": 4}


@dataclass(frozen=True)
class Fp8Model:
    directory: Path
    exact: Path


@dataclass(frozen=True)
class Layout:
    config: Mapping[str, Any]  # config.json's quantization_config
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]  # [N, K] -> e4m3, scales as they are stored
    expand: Callable[[Tensor, tuple[int, int]], Tensor]  # stored scales -> what each element is multiplied by
    scale_name: str = "weight_scale"
    input_scale: str = ""


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / MOST
    return (weight / scale).clamp(-MOST, MOST).to(FP8), scale


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / MOST
    return (weight / scale).clamp(-MOST, MOST).to(FP8), scale


def by_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for row, column in torch.cartesian_prod(torch.arange(scale.shape[0]), torch.arange(scale.shape[1])).tolist():
        block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        scale[row, column] = block.abs().max() / MOST
    return (weight / blocks_of(scale, (rows, columns))).clamp(-MOST, MOST).to(FP8), scale


def blocks_of(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    rows = torch.arange(shape[0])[:, None] // BLOCK
    return scale[rows, torch.arange(shape[1])[None] // BLOCK]


def everywhere(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    return scale.expand(shape)


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
    }


PER_TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}

LAYOUTS: dict[str, Layout] = {
    "compressed-tensors, rows": Layout(compressed("channel", PER_TOKEN), by_rows, everywhere),
}


def write_fp8(directory: Path, layout: Layout, **changes: Any) -> Fp8Model:
    exact = write_model(directory / "exact", **{**CHANGES, **changes})
    stored, multiplied = {}, {}
    for name, weight in load_file(exact / "model.safetensors").items():
        stored[name] = multiplied[name] = weight
        if name.endswith(PRODUCTS):
            multiplied[name], tensors = _quantised(name, weight, layout)
            stored |= tensors
    config = json.loads((exact / "config.json").read_text())
    save_file(multiplied, exact / "model.safetensors", {"format": "pt"})
    quantised = directory / "fp8"
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    return Fp8Model(quantised, exact)


def _quantised(name: str, weight: Tensor, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    values, scale = layout.quantise(weight)
    module = name.removesuffix(".weight")
    tensors = {name: values, f"{module}.{layout.scale_name}": scale.clone()}
    if layout.input_scale:
        tensors[f"{module}.{layout.input_scale}"] = torch.tensor(0.05)
    rows, columns = weight.shape
    return values.float() * layout.expand(scale, (rows, columns)), tensors
