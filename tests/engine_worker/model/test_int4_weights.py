"""4-bit checkpoints give the logits of the same model in float32, dequantized or multiplied in groups on a CPU."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.execution.settings import ExecutionSettings
from engine_worker.model.checkpoint_tensors import checkpoint_tensors, network_tensors
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.linear import LinearSpec
from engine_worker.model.network import Network
from engine_worker.model.preflight import check_files
from engine_worker.model.quantization import linear_method
from engine_worker.model.quantization.grouped import Int4Numbers
from engine_worker.model.quantization.int4 import read_int4
from engine_worker.model.quantization.int4_cuda import int4_experts, stored_numbers
from engine_worker.model.sharding import tensor_parts
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.specs.part import Role
from engine_worker.model.weight_format import DENSE, Int4Scheme
from engine_worker.model.weights import RandomWeights, SafetensorsWeights, ShardedWeights
from kernels.cpu.build import NoLibrary
from kernels.cpu.linear import linear_kernels
from shared.settings import SettingsError
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import NATIVE, Case
from tests.engine_worker.model.int4_checkpoints import LAYOUTS, PHI3, QWEN3_MOE, Int4Model, write_int4
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step

CPU = torch.device("cpu")
EXPERTS = "model.layers.1.mlp.experts"
PROMPT = [(7 * index * index + 3) % 1000 for index in range(24)]
HALF_ROUNDING = 2.0**-11  # of a minimum, which is a float16


def source_of(directory: Path) -> SafetensorsWeights:
    return SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: None)


def spec_of(directory: Path, quantization: str = "auto") -> ModelSpec:
    found = blueprint_from_directory(directory, "native", quantization).shape
    assert isinstance(found, ModelSpec)
    return found


def logits_of(model: Network) -> torch.Tensor:
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    return model.forward(step(0, PROMPT), model.attach(torch.zeros(layout.pool_shape(5))))


def exact_logits(model: Int4Model) -> torch.Tensor:
    return logits_of(Network(spec_of(model.exact), source_of(model.exact), 64, method=linear_method(DENSE, "cpu")))


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Int4Model:
    return write_int4(tmp_path_factory.mktemp("int4"), LAYOUTS[request.param])


def test_dequantized_weights_are_exact(model: Int4Model) -> None:
    check_files(model.directory, quantization="none")
    spec, weights = spec_of(model.directory, "none"), source_of(model.directory)
    network = Network(spec, weights, 64, method=linear_method(spec.quantization, "cpu"))
    weights.check_all_used()
    assert torch.equal(logits_of(network), exact_logits(model))
    assert weights.loaded_bytes == 4 * spec.num_parameters()


def test_weights_in_groups_agree(model: Int4Model) -> None:
    try:
        linear_kernels()
    except NoLibrary as error:
        pytest.skip(f"no C++ kernels here: {error}")
    spec, weights = spec_of(model.directory, "as-stored"), source_of(model.directory)
    network = Network(spec, weights, 64, method=linear_method(spec.quantization, "cpu"))
    weights.check_all_used()
    # Random layers magnify the rounding of inputs to 16 bits; numbers in other places would give no similarity.
    assert torch.cosine_similarity(logits_of(network), exact_logits(model), dim=1).min() > 0.999
    is_in_groups = weights.loaded_bytes < 4 * spec.num_parameters()
    assert is_in_groups == (model.layout.scale_dtype != torch.float32), "other scales have an exact float16"


def test_numbers_in_groups_are_those_of_the_checkpoint(model: Int4Model) -> None:
    spec = spec_of(model.directory)
    module = "model.layers.1.self_attn.q_proj"
    linear = LinearSpec(role=Role.QKV, names=(module,), outputs=(256,), inputs=256, bias=True)
    rows = Int4Numbers(spec.quantization).rows(linear, source_of(model.directory))
    exact = load_file(model.exact / "model.safetensors")[f"{module}.weight"]
    if model.layout.scale_dtype == torch.float32:  # no exact float16
        assert rows is None
    elif not model.layout.has_zeros:
        assert rows is not None and torch.equal(rows.values(), exact)
    else:
        assert rows is not None and rows.minima is not None
        rounding = float(rows.minima.abs().max()) * HALF_ROUNDING
        torch.testing.assert_close(rows.values(), exact, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", ["compressed-tensors, zero points", "gptq, zero points", "awq"])
def test_ranks_read_their_own_part(name: str, tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS[name])
    spec = spec_of(model.directory)
    scheme = spec.quantization.scheme_of("model.layers.0.mlp.up_proj")
    assert isinstance(scheme, Int4Scheme)
    for layer, rows, columns, dim in (("mlp.up_proj", 384, 256, 0), ("self_attn.o_proj", 256, 256, 1)):
        module = f"model.layers.1.{layer}"
        whole = read_int4(source_of(model.directory), module, (rows, columns), scheme).exact()
        for rank in range(2):
            parts = tensor_parts(spec, rank, 2)
            own = ShardedWeights(source_of(model.directory), checkpoint_tensors(spec), parts)
            shape = (rows // 2, columns) if dim == 0 else (rows, columns // 2)
            part = read_int4(own, module, shape, scheme).exact()
            assert torch.equal(part, whole.chunk(2, dim)[rank])


@pytest.mark.parametrize(
    ("name", "case"),
    [("compressed-tensors, groups of 128", PHI3), ("gptq", PHI3), ("gptq, zero points", QWEN3_MOE), ("awq", QWEN3_MOE)],
)
def test_fused_rows_and_experts_keep_their_scales(name: str, case: Case, tmp_path: Path) -> None:
    """Phi-3 has fused tensors."""
    model = write_int4(tmp_path, LAYOUTS[name], case)
    check_files(model.directory, quantization="none")
    spec, weights = spec_of(model.directory, "none"), source_of(model.directory)
    network = Network(spec, weights, 64, method=linear_method(spec.quantization, "cpu"))
    weights.check_all_used()
    assert torch.equal(logits_of(network), exact_logits(model))


@pytest.mark.parametrize("name", ["compressed-tensors, groups of 32", "gptq, zero points", "awq"])
def test_experts_of_cuda_have_the_numbers_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS[name], QWEN3_MOE)
    scheme = spec_of(model.directory).quantization.scheme_of(f"{EXPERTS}.0.up_proj")
    assert isinstance(scheme, Int4Scheme)
    linears = [
        LinearSpec(
            role=Role.GATE_UP, names=(f"{EXPERTS}.{expert}.gate_proj", f"{EXPERTS}.{expert}.up_proj"),
            outputs=(64, 64), inputs=128, bias=False,
        )
        for expert in range(4)
    ]  # fmt: skip
    source = source_of(model.directory)
    weight = int4_experts([stored_numbers(linear, [scheme, scheme], source) for linear in linears], source)
    stored = load_file(model.exact / "model.safetensors")
    exact = [torch.cat([stored[f"{name}.weight"] for name in linear.names]) for linear in linears]
    assert torch.equal(weight.exact_weight(), torch.stack(exact))


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS["gptq"])
    spec = spec_of(model.directory)
    network = Network(spec, RandomWeights(CPU, torch.float32), 64, method=linear_method(spec.quantization, "cpu"))
    assert logits_of(network).isfinite().all()


def test_reordered_inputs_are_refused(tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS["gptq"])
    path = model.directory / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.down_proj.g_idx"
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, path)
    with pytest.raises(ValueError, match=rf"{name}: inputs are reordered between groups \(desc_act"):
        check_files(model.directory)


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = write_int4(tmp_path, LAYOUTS["awq"])
    path, name = model.directory / "model.safetensors", "model.layers.0.mlp.up_proj.scales"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name][:2].contiguous()}, path)
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 384\); config.json requires \(4, 384\)"):
        check_files(model.directory)


def test_rounded_layers_get_the_largest_group_that_divides_their_inputs(tmp_path: Path) -> None:
    directory = write_family(tmp_path, replace(NATIVE["llama"], changes={"hidden_size": 192, "intermediate_size": 256}))
    blueprint = blueprint_from_directory(directory, "native", "int4", int4_group=128)
    assert blueprint.weight_kind == "int4"
    assert "groups of 128: 3, groups of 64: 18" in blueprint.weight_format


def test_bytes_of_rounded_layers_count_no_minima_of_experts(tmp_path: Path) -> None:
    directory = write_family(tmp_path, QWEN3_MOE)
    in_16_bits = blueprint_from_directory(directory, "native").weights_bytes(1, 2)
    in_4_bits = blueprint_from_directory(directory, "native", "int4", int4_group=32).weights_bytes(1, 2)
    layers = {one.name: math.prod(one.shape) for one in network_tensors(spec_of(directory)) if one.product is not None}
    experts = sum(size for name, size in layers.items() if ".experts." in name)
    others = sum(layers.values()) - experts - layers["lm_head.weight"]
    assert experts > 0 < others
    assert in_16_bits - in_4_bits == experts * (2 - 1 / 2 - 2 / 32) + others * (2 - 1 / 2 - 4 / 32)


def test_int4_in_other_groups_is_refused_on_a_cpu() -> None:
    settings = ExecutionSettings(model=Path("m"), quantization="int4", int4_group_size=64)
    assert settings.for_device("cuda").int4_group("cuda") == 64
    with pytest.raises(SettingsError, match="--int4-group-size: expected 32 on cpu, got 64"):
        settings.for_device("cpu")
