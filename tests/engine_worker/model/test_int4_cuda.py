"""4-bit checkpoints on a Hopper GPU, multiplied in 4 bits: logits, and tokens in any schedule with --deterministic."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.int4_cuda import Int4Method
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import SafetensorsWeights
from tests.engine_worker.model.int4_checkpoints import LAYOUTS, QWEN3_MOE, write_int4
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step
from tests.engine_worker.model.quantized_schedules import check_outputs, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU here"
    ),
]
NUM_LINEAR_LAYERS = 3 * 4  # three layers: qkv, output, gate and up, down
PROMPT = [(7 * index * index + 3) % 1000 for index in range(48)]


def logits_of(
    directory: Path, device: str, dtype: torch.dtype, *, is_exact: bool
) -> tuple[torch.Tensor, SafetensorsWeights, ModelSpec]:
    spec = blueprint_from_directory(directory, "native").shape
    assert isinstance(spec, ModelSpec)
    weights = SafetensorsWeights(directory, torch.device(device), dtype, lambda share, detail: None)
    model = Network(spec, weights, 64, method=linear_method(DENSE if is_exact else spec.quantization, device))
    layout = kv_layout(spec, BLOCK_SIZE, str(dtype).removeprefix("torch."), max_groups=1)
    cache = model.attach(torch.zeros(layout.pool_shape(8), dtype=dtype, device=device))
    inputs = step(0, PROMPT)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    on_device: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return model.forward(replace(inputs, **on_device), cache).cpu(), weights, spec


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
    all_chosen = replace(QWEN3_MOE, changes=QWEN3_MOE.changes | {"num_experts_per_tok": 4})  # no choice near a tie
    model = write_int4(tmp_path, LAYOUTS[name], all_chosen)
    found, weights, spec = logits_of(model.directory, "cuda", torch.bfloat16, is_exact=False)
    assert weights.loaded_bytes < 2 * spec.num_parameters()
    exact, _, _ = logits_of(model.exact, "cpu", torch.float32, is_exact=True)
    in_16_bits, _, _ = logits_of(model.exact, "cuda", torch.bfloat16, is_exact=True)
    assert torch.dist(found, exact) < 1.3 * torch.dist(in_16_bits, exact)


@pytest.mark.timeout(600)
def test_int4_bits_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    results = results_of(write_int4(tmp_path, LAYOUTS["gptq"]).directory)
    assert results["linear_layers"] == NUM_LINEAR_LAYERS
    for kv, outputs in results["kv"].items():
        check_outputs(kv, outputs)
