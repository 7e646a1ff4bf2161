"""4-bit checkpoints on a Hopper GPU, multiplied in 4 bits: logits, and tokens in any schedule with --deterministic."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.model.checkpoint_tensors import network_tensors
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.int4_cuda import Int4Method
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import DENSE, WeightFormat
from engine_worker.model.weights import SafetensorsWeights
from kernels.w4a16.rounding import rounded_symmetric, rounded_with_minimum
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.int4_checkpoints import LAYOUTS, LLAMA, QWEN3_MOE, write_int4
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step
from tests.engine_worker.model.quantized_schedules import check_outputs, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
# All experts of a token are chosen, so that no choice is near a tie.
ALL_CHOSEN = replace(QWEN3_MOE, changes=QWEN3_MOE.changes | {"num_experts_per_tok": 4})
NUM_LINEAR_LAYERS = 3 * 4  # three layers: qkv, output, gate and up, down
PROMPT = [(7 * index * index + 3) % 1000 for index in range(48)]


def logits_of(
    directory: Path, device: str, dtype: torch.dtype, *, is_exact: bool
) -> tuple[torch.Tensor, SafetensorsWeights, ModelSpec]:
    spec = blueprint_from_directory(directory, "native").shape
    assert isinstance(spec, ModelSpec)
    logits, weights = logits_by(spec, directory, device, dtype, DENSE if is_exact else spec.quantization)
    return logits, weights, spec


def logits_by(
    spec: ModelSpec, directory: Path, device: str, dtype: torch.dtype, stored: WeightFormat
) -> tuple[torch.Tensor, SafetensorsWeights]:
    weights = SafetensorsWeights(directory, torch.device(device), dtype, lambda share, detail: None)
    model = Network(spec, weights, 64, method=linear_method(stored, device))
    layout = kv_layout(spec, BLOCK_SIZE, str(dtype).removeprefix("torch."), max_groups=1)
    cache = model.attach(torch.zeros(layout.pool_shape(8), dtype=dtype, device=device))
    inputs = step(0, PROMPT)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    on_device: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return model.forward(replace(inputs, **on_device), cache).cpu(), weights


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_no_farther_from_exact_ones_than_those_of_16_bits(name: str, tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS[name])
    found, weights, spec = logits_of(model.directory, "cuda", torch.bfloat16, is_exact=False)
    assert isinstance(linear_method(spec.quantization, "cuda"), Int4Method)
    assert weights.loaded_bytes < 2 * spec.num_parameters()
    exact, _, _ = logits_of(model.exact, "cpu", torch.float32, is_exact=True)
    in_16_bits, _, _ = logits_of(model.exact, "cuda", torch.bfloat16, is_exact=True)
    # Both round all activations; the weights of 16 bits are rounded, and those of 4 bits with many rows.
    assert torch.dist(found, exact) < 1.3 * torch.dist(in_16_bits, exact)


@pytest.mark.parametrize("name", ["compressed-tensors, groups of 32", "gptq, zero points", "awq"])
def test_experts_are_no_farther_from_exact_logits_than_those_of_16_bits(name: str, tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS[name], ALL_CHOSEN)
    found, weights, spec = logits_of(model.directory, "cuda", torch.bfloat16, is_exact=False)
    assert weights.loaded_bytes < 2 * spec.num_parameters()
    exact, _, _ = logits_of(model.exact, "cpu", torch.float32, is_exact=True)
    in_16_bits, _, _ = logits_of(model.exact, "cuda", torch.bfloat16, is_exact=True)
    assert torch.dist(found, exact) < 1.3 * torch.dist(in_16_bits, exact)


@pytest.mark.parametrize("case", [LLAMA, ALL_CHOSEN], ids=["dense", "experts"])
@pytest.mark.parametrize("group", [32, 128])
def test_weights_that_are_rounded_while_loading_give_the_logits_of_the_rounded_numbers(
    case: Case, group: int, tmp_path: Path
) -> None:
    directory = write_family(tmp_path / "model", case)
    blueprint = blueprint_from_directory(directory, "native", "int4", int4_group=group)
    assert isinstance(blueprint.shape, ModelSpec)
    found, weights = logits_by(blueprint.shape, directory, "cuda", torch.bfloat16, blueprint.shape.quantization)
    assert weights.loaded_bytes < 2 * blueprint.shape.num_parameters()
    write_rounded(directory, blueprint.shape, tmp_path / "rounded", group)
    exact, _ = logits_by(blueprint.shape, tmp_path / "rounded", "cpu", torch.float32, DENSE)
    in_16_bits, _ = logits_by(blueprint.shape, tmp_path / "rounded", "cuda", torch.bfloat16, DENSE)
    # Both round all activations and weights. Beside minima, a prompt's scales are rounded too: the error of the weights
    # is 1.5 times as large.
    most = 2 if group == 32 and case is LLAMA else 1.3
    assert torch.dist(found, exact) < most * torch.dist(in_16_bits, exact)


def write_rounded(directory: Path, spec: ModelSpec, rounded_directory: Path, group: int) -> None:
    """Write the model with the numbers that its linear layers are rounded to."""
    shutil.copytree(directory, rounded_directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    layers = [one for one in network_tensors(spec) if one.product not in {None, Role.HEAD} and one.name in tensors]
    for layer in layers:
        size = next(size for size in (group, 64) if layer.shape[1] % size == 0)
        has_minimum = size == 32 and not layer.of_experts
        tensors[layer.name] = rounded_numbers(tensors[layer.name], size, has_minimum=has_minimum)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(tensors, rounded_directory / "model.safetensors", metadata={"format": "pt"})


def rounded_numbers(weight: torch.Tensor, group: int, *, has_minimum: bool) -> torch.Tensor:
    if has_minimum:
        values, scales, minima = rounded_with_minimum(weight, group)
        exact = values.unflatten(1, (-1, group)) * scales.float()[..., None] + minima.float()[..., None]
    else:
        values, scales = rounded_symmetric(weight, group)
        exact = (values.unflatten(1, (-1, group)).float() - 8) * scales[..., None]
    return exact.flatten(1)


@pytest.mark.timeout(600)
def test_int4_bits_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    results = results_of(write_int4(tmp_path, LAYOUTS["gptq"]).directory)
    assert results["linear_layers"] == NUM_LINEAR_LAYERS
    for kv, outputs in results["kv"].items():
        check_outputs(kv, outputs)
