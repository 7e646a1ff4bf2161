"""Both devices compute the same network; CudaStep runs here on CPU tensors by its kernels' references."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_worker.model import compiled_step, cuda_attention
from engine_worker.model.architectures import spec_from_directory
from engine_worker.model.attention_backend import AttentionBackend, refuse_attention
from engine_worker.model.compiled_step import CompiledDevice, step_kernels
from engine_worker.model.cpu_step import CpuDevice
from engine_worker.model.cuda_step import CudaDevice
from engine_worker.model.devices import Device
from engine_worker.model.linear import Input
from engine_worker.model.network import Network
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.dense_cpu import CpuLinear
from engine_worker.model.served_model import StepOutput
from engine_worker.model.spec import ModelShape
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import SafetensorsWeights
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.cpu.build import NoLibrary
from kernels.cpu.library import CpuLibrary
from kernels.scaled import Scaling
from tests.builders import make_sequence
from tests.engine_worker.execution.reference import write_model
from tests.engine_worker.execution.reference_inputs import reference_model_input
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE

BLOCK_SIZE = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Network:
    directory = write_model(tmp_path_factory.mktemp("tiny"))
    weights = SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: None)
    return Network(spec_from_directory(Path(directory)), weights, max_len=256)


@pytest.fixture(scope="module")
def cuda_model(tmp_path_factory: pytest.TempPathFactory) -> Network:
    """Return a network of the same weights whose linear layers run as on CUDA."""
    directory = write_model(tmp_path_factory.mktemp("tiny_cuda"))
    weights = SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: None)
    method = linear_method(DENSE, "cuda")
    return Network(spec_from_directory(Path(directory)), weights, max_len=256, method=method)


def compiled_device(spec: ModelShape, pool: torch.Tensor) -> CompiledDevice:
    try:
        return CompiledDevice(spec, pool, step_kernels(spec, pool.dtype, pool.dtype))
    except NoLibrary as error:
        pytest.skip(f"no C++ kernels here: {error}")


def logits_and_pool(
    model: Network, device_class: Callable[..., Device], look: Callable[[StepOutput], None] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run three steps: part of a prompt, its next part beside a whole one, and its rest beside a decode."""
    config = model.spec
    pool = torch.zeros(16, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    device: Device = device_class(config, pool)
    long, short = make_sequence(30, "long"), make_sequence(9, "short", output_token_ids=[5])
    long.kv.tables[0].blocks, short.kv.tables[0].blocks = [3, 9, 1, 7], [4, 2]
    steps = [
        [ScheduledSequence(long, 0, 6, samples=False)],
        [ScheduledSequence(long, 6, 7, samples=False), ScheduledSequence(short, 0, 9, samples=True)],
        [ScheduledSequence(long, 13, 17, samples=True), ScheduledSequence(short, 9, 1, samples=True)],
    ]
    inputs = [reference_model_input(ScheduledBatch(step), BLOCK_SIZE) for step in steps]
    return [model.forward(model_input, device, look) for model_input in inputs], pool


@pytest.mark.parametrize(
    "max_wasted_query_rows", [cuda_attention.MAX_WASTED_QUERY_ROWS, 0], ids=["all_rows", "last_rows"]
)
@pytest.mark.parametrize("device_class", [CpuDevice, compiled_device], ids=["torch", "compiled"])
def test_devices_give_the_same_logits_and_cache(
    model: Network,
    cuda_model: Network,
    monkeypatch: pytest.MonkeyPatch,
    max_wasted_query_rows: int,
    device_class: Callable[..., Device],
) -> None:
    monkeypatch.setattr(cuda_attention, "MAX_WASTED_QUERY_ROWS", max_wasted_query_rows)
    cpu_logits, cpu_pool = logits_and_pool(model, device_class)
    cuda_logits, cuda_pool = logits_and_pool(cuda_model, CudaDevice)
    assert [len(logits) for logits in cpu_logits] == [0, 1, 2]
    for on_cpu, on_cuda in zip(cpu_logits, cuda_logits, strict=True):
        assert not len(on_cpu) or on_cpu.std() > 0.5
        torch.testing.assert_close(on_cpu, on_cuda, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cpu_pool, cuda_pool, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("head_dim", "is_served"), [(64, True), (80, True), (96, True), (128, True), (256, True), (512, False)]
)
def test_unsupported_head_dim_error_names_the_kernel(head_dim: int, is_served: bool, tmp_path: Path) -> None:
    shape = replace(spec_from_directory(write_model(tmp_path)).attentions[0], head_dim=head_dim)
    spec = spec_from_directory(tmp_path)
    spec = replace(spec, layers=(replace(spec.layers[0], mixer=shape),))
    refuse_attention(spec.attentions, "bfloat16", "cpu")
    refused = pytest.raises(ValueError, match=f"even head size of at most 256; this model's is {head_dim}")
    with nullcontext() if is_served else refused:
        refuse_attention(spec.attentions, "bfloat16", "cuda")


RULED = ["mistral with a window", "gemma2", "gemma3_text", "smollm3 with windows"]


@pytest.mark.parametrize("device_class", [CpuDevice, compiled_device], ids=["torch", "compiled"])
@pytest.mark.parametrize("name", RULED)
def test_windows_caps_and_gates_match_on_all_devices(
    name: str, device_class: Callable[..., Device], tmp_path: Path
) -> None:
    directory = write_family(tmp_path, NATIVE[name])
    weights = SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: None)
    spec = spec_from_directory(directory)
    assert {attention.window for attention in spec.attentions} - {0}
    # Windows end inside the prompt of 30 tokens, in blocks of 8.
    shorter = [replace(each, window=min(each.window, 11)) for each in spec.attentions]
    layers = [replace(each, mixer=attention) for each, attention in zip(spec.layers, shorter, strict=True)]
    short = replace(spec, layers=tuple(layers))
    on_cpu, cpu_pool = logits_and_pool(Network(short, weights, max_len=256), device_class)
    as_on_cuda = Network(short, weights, max_len=256, method=linear_method(DENSE, "cuda"))
    on_cuda, cuda_pool = logits_and_pool(as_on_cuda, CudaDevice)
    for ours, theirs in zip(on_cpu, on_cuda, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(cpu_pool, cuda_pool, atol=2e-4, rtol=1e-4)


def test_last_layer_computes_only_wanted_tokens(model: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    gated = CpuLinear.gated

    def count(gate_up: CpuLinear, x: Input, gate: GateSpec, scaling: Scaling) -> torch.Tensor:
        rows.append(len(x))
        return gated(gate_up, x, gate, scaling)

    monkeypatch.setattr(CpuLinear, "gated", count)
    logits, pool = logits_and_pool(model, CpuDevice)
    all_but_the_last = model.spec.num_layers - 1
    assert rows == [6] * all_but_the_last + [0] + [16] * all_but_the_last + [1] + [18] * all_but_the_last + [2]
    # A callback that reads other rows gets all of them, and nothing else changes.
    of_all_rows, pool_of_all_rows = logits_and_pool(model, CpuDevice, look=lambda output: None)
    torch.testing.assert_close(logits, of_all_rows, atol=1e-5, rtol=1e-5)
    assert torch.equal(pool, pool_of_all_rows)


def test_attach_chooses_by_the_kv_pool(model: Network) -> None:
    config = model.spec
    pool = torch.zeros(2, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    try:
        step_kernels(config, pool.dtype, pool.dtype)
    except NoLibrary:
        assert isinstance(model.attach(pool), CpuDevice)
    else:
        compiled = model.attach(pool)
        assert isinstance(compiled, CompiledDevice)
        backend: AttentionBackend = compiled.attention  # checked by mypy
        assert all(not backend.supports(layer, "float32") for layer in config.attentions)
        assert isinstance(model.attach(pool.to(torch.float8_e4m3fn)), CompiledDevice)
    # The kernels do not read float16.
    assert isinstance(model.attach(pool.to(torch.float16)), CpuDevice)


def test_missing_library_falls_back_to_torch_and_logs(
    model: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> CpuLibrary:
        raise NoLibrary("there is no compiler")

    monkeypatch.setattr(compiled_step, "cpu_library", none)
    config = model.spec
    with caplog.at_level("INFO"):
        pool = torch.zeros(2, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        assert isinstance(model.attach(pool), CpuDevice)
    assert "there is no compiler" in caplog.text
