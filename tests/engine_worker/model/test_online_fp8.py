"""`--quantization`: 16-bit weights quantized to fp8 while loading, fp8 dequantized to 16 bits, and random weights."""

import logging
from pathlib import Path

import pytest
import torch

from engine_worker.execution.load.load_replica import load_plan, load_replica
from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.preflight import check_files
from engine_worker.model.quantization import dense, linear_method
from engine_worker.model.quantization.fp8 import Fp8Method
from engine_worker.model.weights import RandomWeights
from kernels.scaled import quantize_rows_reference
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, LLAMA, PHI3, ROWS, Fp8Model, write_fp8
from tests.engine_worker.model.test_fp8_weights import (
    CPU,
    NUM_LAYERS,
    ReferenceLinear,
    exact_logits,
    logits_of,
    source_of,
    spec_of,
)


@pytest.fixture(scope="module", params=[LLAMA, PHI3], ids=lambda case: case.model_type)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fp8Model:
    """Return a 32-bit checkpoint, and the same one quantized with one scale per row."""
    directory = tmp_path_factory.mktemp("online")
    made = write_fp8(directory, ROWS, request.param)
    return Fp8Model(write_family(directory / "plain", request.param), made.exact)


def test_online_fp8_equals_a_row_scaled_checkpoint(model: Fp8Model) -> None:
    spec = spec_of(model.directory, "fp8")
    weights = source_of(model.directory)
    assert torch.equal(logits_of(Network(spec, weights, 64)), exact_logits(model))
    assert not torch.equal(logits_of(Network(spec_of(model.directory), weights, 64)), exact_logits(model))


def test_fp8_linear_layers_are_made_from_16_bits(model: Fp8Model) -> None:
    ReferenceLinear.made = []
    spec, weights = spec_of(model.directory, "fp8"), source_of(model.directory)
    method = Fp8Method(spec.quantization, dense.method("cpu"), ReferenceLinear)
    assert torch.equal(logits_of(Network(spec, weights, 64, method=method)), exact_logits(model))
    assert len(ReferenceLinear.made) == 4 * NUM_LAYERS
    assert weights.loaded_bytes == blueprint_from_directory(model.directory, "native", "fp8").weights_bytes(1, 4)


def test_quantization_none_runs_fp8_checkpoint_in_16_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="worker")
    model = write_fp8(tmp_path, LAYOUTS["fp8, blocks"])
    found = blueprint_from_directory(model.directory, "native", "none")
    method = linear_method(spec_of(model.directory, "none").quantization, "cuda")  # would run fp8 linear layers
    assert not isinstance(method, Fp8Method)
    assert caplog.messages[-1].endswith("dequantized while loading: --quantization none")
    assert found.weight_format == ""
    network = found.build(source_of(model.directory), 64, is_deterministic=False)
    assert isinstance(network, Network)
    assert torch.equal(logits_of(network), exact_logits(model))


def test_quantization_fp8_keeps_an_fp8_checkpoint(tmp_path: Path) -> None:
    model = write_fp8(tmp_path, LAYOUTS["fp8, blocks"])
    assert spec_of(model.directory, "fp8") == spec_of(model.directory)


def test_rows_of_zeros_and_extreme_values_quantize() -> None:
    rows = torch.zeros(5, 16)
    rows[1, 3] = torch.finfo(torch.float32).tiny
    rows[2, 3] = torch.finfo(torch.bfloat16).max
    rows[3] = torch.linspace(-448.0, 448.0, 16)
    rows[4, 5] = torch.finfo(torch.float32).smallest_normal / 2**20
    for dtype in (torch.float32, torch.bfloat16):
        quantized = quantize_rows_reference(rows.to(dtype))
        made, scale = quantized.exact_rows(), quantized.scales
        assert made.isfinite().all() and scale.isfinite().all()
        # Four bits of mantissa with the hidden one: half a unit is 1/16 of a value, and values below the smallest are
        # lost.
        assert ((made - rows.to(dtype).float()).abs() <= rows.abs() / 16 + scale[:, None] * 2.0**-9).all()
        assert not quantized.values[0].float().any()


@pytest.mark.parametrize("name", ["compressed-tensors, rows", "fp8, blocks", "fp8, tensors, static"])
def test_random_fp8_weights_have_the_16_bit_deviation(name: str, tmp_path: Path) -> None:
    model = write_fp8(tmp_path, LAYOUTS[name])
    (model.directory / "model.safetensors").unlink()
    check_files(model.directory, load_format="dummy")
    ReferenceLinear.made = []
    spec = spec_of(model.directory)
    method = Fp8Method(spec.quantization, dense.method("cpu"), ReferenceLinear)
    Network(spec, RandomWeights(CPU, torch.float32), 64, method=method)
    for linear in ReferenceLinear.made:
        assert linear.weight.std() == pytest.approx(0.02, rel=0.02)


def test_worker_start_logs_the_format(model: Fp8Model) -> None:
    lines: list[str] = []
    settings = ExecutionSettings(
        model=model.directory, device="cpu", dtype="float32", quantization="fp8", kv_cache_memory_bytes=2**24,
        max_model_len=64,
    )  # fmt: skip
    load_replica(load_plan(settings), lambda phase, progress, detail: lines.append(detail))
    matching = [line for line in lines if "of float32 weights on cpu" in line]
    assert len(matching) == 1 and "linear layers in fp8, quantized while loading, native implementation" in matching[0]
