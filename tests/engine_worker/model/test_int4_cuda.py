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
from tests.engine_worker.model.int4_checkpoints import LAYOUTS, write_int4
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


def logits_of(directory: Path, *, is_exact: bool) -> tuple[torch.Tensor, SafetensorsWeights, ModelSpec]:
    device = torch.device("cuda")
    spec = blueprint_from_directory(directory, "native").shape
    assert isinstance(spec, ModelSpec)
    weights = SafetensorsWeights(directory, device, torch.bfloat16, lambda share, detail: None)
    model = Network(spec, weights, 64, method=linear_method(DENSE if is_exact else spec.quantization, "cuda"))
    layout = kv_layout(spec, BLOCK_SIZE, "bfloat16", max_groups=1)
    cache = model.attach(torch.zeros(layout.pool_shape(8), dtype=torch.bfloat16, device=device))
    inputs = step(0, PROMPT)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    on_device: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return model.forward(replace(inputs, **on_device), cache), weights, spec


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_exact_model(name: str, tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS[name])
    found, weights, spec = logits_of(model.directory, is_exact=False)
    expected, _, _ = logits_of(model.exact, is_exact=True)
    # The exact model's weights are rounded to bfloat16, as are all activations.
    assert torch.cosine_similarity(found, expected, dim=1).min() > 0.999
    assert isinstance(linear_method(spec.quantization, "cuda"), Int4Method)
    assert weights.loaded_bytes < 2 * spec.num_parameters()


@pytest.mark.timeout(600)
def test_int4_bits_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    results = results_of(write_int4(tmp_path, LAYOUTS["gptq"]).directory)
    assert results["linear_layers"] == NUM_LINEAR_LAYERS
    for kv, outputs in results["kv"].items():
        check_outputs(kv, outputs)
