"""fp8 checkpoints give the logits of the same model in float32, dequantized or with fp8 linear layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_worker.model.compiled_step import CompiledDevice
from engine_worker.model.cpu_step import CpuDevice
from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.linear import Input
from engine_worker.model.network import Network
from engine_worker.model.preflight import check_files
from engine_worker.model.quantization import dense, linear_method
from engine_worker.model.quantization.dense_cpu import CpuLinear
from engine_worker.model.quantization.fp8 import Fp8Method
from engine_worker.model.sharding import valid_tensor_parallel_sizes
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.specs.mlp import GateSpec
from engine_worker.model.weight_format import DENSE
from engine_worker.model.weights import SafetensorsWeights
from kernels.fp8_kv import KVScales
from kernels.scaled import Scaling
from tests.builders import make_request
from tests.engine_worker.execution.reference import generate, make_runner
from tests.engine_worker.model.family_cases import NATIVE, Case
from tests.engine_worker.model.fp8_checkpoints import (
    BLOCK,
    FP8,
    LAYOUTS,
    LLAMA,
    PHI3,
    Fp8Model,
    Layout,
    of_all,
    spread,
    write_fp8,
)
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step

CPU = torch.device("cpu")
NUM_LAYERS = 3
PROMPT = [(7 * index * index + 3) % 1000 for index in range(24)]


class ReferenceLinear:
    """Float32 replacement of fp8_cuda.Fp8Linear with the same arguments, which refuses others."""

    made: ClassVar[list["ReferenceLinear"]] = []
    scaling = Scaling.NONE

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        input_scale: float | None = None,
        is_gated: bool,
    ) -> None:
        rows, columns = weight.shape
        assert weight.dtype == FP8 and weight.is_contiguous()
        assert weight_scale.dtype == torch.float32 and weight_scale.is_contiguous()
        is_blocks = weight_scale.dim() == 2
        assert tuple(weight_scale.shape) == ((-(-rows // BLOCK), -(-columns // BLOCK)) if is_blocks else (rows,))
        scale = weight_scale if is_blocks else weight_scale[:, None]
        self.weight = weight.float() * spread(scale, (rows, columns), is_blocks)
        self._linear = CpuLinear(self.weight, bias)
        self.input_scale, self.is_gated = input_scale, is_gated
        self.made.append(self)

    def __call__(self, x: Input) -> Tensor:
        assert isinstance(x, Tensor)
        return self._linear(x)

    def gated(self, x: Input, gate: GateSpec, scaling: Scaling = Scaling.NONE) -> Tensor:
        assert self.is_gated
        return self._linear.gated(x, gate, scaling)


def source_of(directory: Path) -> SafetensorsWeights:
    return SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: None)


def spec_of(directory: Path, quantization: str = "auto") -> ModelSpec:
    found = blueprint_from_directory(directory, "native", quantization).shape
    assert isinstance(found, ModelSpec)
    return found


def logits_of(model: Network) -> Tensor:
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    return model.forward(step(0, PROMPT), model.attach(torch.zeros(layout.pool_shape(5))))


def exact_logits(model: Fp8Model) -> Tensor:
    """Return the logits of a network without fp8 on the multiplied-out weights: same operands, so same bits."""
    return logits_of(Network(spec_of(model.exact), source_of(model.exact), 64, method=linear_method(DENSE, "cpu")))


def logits_by_fp8_linear(directory: Path) -> Tensor:
    """Return the logits by fp8_cuda's interface, and check that all tensors are used."""
    ReferenceLinear.made = []
    spec, weights = spec_of(directory), source_of(directory)
    method = Fp8Method(spec.quantization, dense.method("cpu"), ReferenceLinear)
    network = Network(spec, weights, 64, method=method)
    weights.check_all_used()
    return logits_of(network)


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fp8Model:
    return write_fp8(tmp_path_factory.mktemp("fp8"), LAYOUTS[request.param])


def test_checkpoint_is_dequantized_on_a_cpu(model: Fp8Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="worker")
    check_files(model.directory)
    found = blueprint_from_directory(model.directory)
    weights = source_of(model.directory)
    network = found.build(weights, 64, is_deterministic=False)
    assert isinstance(network, Network)
    assert torch.equal(logits_of(network), exact_logits(model))
    assert f"weights: {found.weight_format}: dequantized while loading: cpu does not support fp8" in caplog.messages
    assert weights.loaded_bytes == 4 * found.shape.num_parameters()


def test_fp8_linear_layers_have_their_own_scales(model: Fp8Model) -> None:
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    assert len(ReferenceLinear.made) == 4 * NUM_LAYERS
    # q, k and v share one input, so its scale is the largest of their three.
    scales = {linear.input_scale for linear in ReferenceLinear.made}
    assert scales in ({None}, {0.25, 0.125})


@pytest.mark.parametrize("name", ["compressed-tensors, rows", "fp8, blocks", "modelopt"])
@pytest.mark.parametrize("family", ["phi3", "helium", "glm4"])
def test_fused_and_reordered_rows_keep_their_scales(name: str, family: str, tmp_path: Path) -> None:
    """Helium reorders rows, Phi-3 has fused tensors, and GLM-4 has both for half of a head."""
    case = PHI3 if family == "phi3" else NATIVE[family]
    model = write_fp8(tmp_path, LAYOUTS[name], case)
    check_files(model.directory)
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    assert ReferenceLinear.made


def of_hybrids(module: str) -> bool:
    """Whether a module of a hybrid is a linear layer in fp8: no router, filter or output head, and no small gate."""
    others = (".gate", "_gate", "norm", "norm_f", "conv1d", "embeddings", "embed_tokens", "lm_head")
    return not module.endswith((*others, "in_proj_a", "in_proj_b"))


@pytest.mark.parametrize(
    ("family", "layout"),
    [("nemotron_h, experts", "modelopt"), ("qwen3_5_moe_text", "fp8, tensors of transformers, static")],
)
def test_fp8_layers_of_hybrids_have_their_exact_weights(family: str, layout: str, tmp_path: Path) -> None:
    small = ["re:.*in_proj_[ab]$"]
    chosen = replace(LAYOUTS[layout], config={**LAYOUTS[layout].config, "modules_to_not_convert": ["lm_head", *small]})
    model = write_fp8(tmp_path, chosen, NATIVE[family], of_hybrids)
    check_files(model.directory)
    request = make_request(PROMPT, "a", max_tokens=12, ignore_eos=True)
    found, expected = (
        generate(make_runner(directory, num_blocks=64), [request], max_num_seqs=1, max_num_batched_tokens=16)
        for directory in (model.directory, model.exact)
    )
    assert found == expected


def test_misaligned_fp8_blocks_are_multiplied_in_16_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="worker")
    changes = {**LLAMA.changes, "num_key_value_heads": 1, "intermediate_size": 192}
    model = write_fp8(tmp_path, LAYOUTS["fp8, blocks"], Case("llama", changes))
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    # 64 rows of keys put the values inside a block; 192 rows of gates put `up` inside one.
    assert len(ReferenceLinear.made) == 2 * NUM_LAYERS
    assert caplog.messages[0] == (
        "model.layers.0.self_attn.q_proj: dequantized to 16 bits: its parts of 256, 64, 64 rows do not "
        "start at multiples of 128"
    )


KEPT = ("layers.1.self_attn.q_proj", "layers.1.mlp.down_proj")
IGNORED: dict[str, tuple[str, str, list[str]]] = {
    "exact": ("compressed-tensors, rows", "ignore", ["lm_head", *(f"model.{name}" for name in KEPT)]),
    "patterns": ("compressed-tensors, rows", "ignore", ["lm_head", r"re:.*layers\.1\.self_attn\.q", "re:.*1.mlp.down"]),
    "of an image model": ("compressed-tensors, rows", "ignore",
                          ["lm_head", "re:vision_tower.*", *(f"model.language_model.{name}" for name in KEPT)]),
    "parents": ("fp8, blocks", "modules_to_not_convert",
                [*(f"model.{name}" for name in KEPT), "model.layers.1.mlp.gate"]),
    "last parts": ("fp8, tensors, static", "ignored_layers", list(KEPT)),
    "wildcards": ("modelopt", "exclude_modules", ["lm_head", "*layers.1.self_attn.q*", "*1.mlp.down_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("how", IGNORED)
def test_ignored_layers_stay_in_16_bits(how: str, tmp_path: Path) -> None:
    """When one of q, k and v stays in 16 bits, the fused layer of all three does too."""
    name, key, ignored = IGNORED[how]
    layout = replace(LAYOUTS[name], config={**LAYOUTS[name].config, key: ignored})
    model = write_fp8(tmp_path, layout, is_fp8=lambda module: module.endswith("_proj") and not module.endswith(KEPT))
    check_files(model.directory)
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    assert len(ReferenceLinear.made) == 4 * NUM_LAYERS - 2
    spec = spec_of(model.directory)
    assert torch.equal(logits_of(Network(spec, source_of(model.directory), 64)), exact_logits(model))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("compressed-tensors, rows", KVScales()),
        ("compressed-tensors, tensors, static", KVScales(0.5, 0.25)),
        ("fp8, tensors, static", KVScales(0.5, 0.5)),
        ("modelopt", KVScales(0.5, 0.25)),
    ],
)
def test_kv_scales_come_from_the_checkpoint(layout: str, expected: KVScales, tmp_path: Path) -> None:
    model = write_fp8(tmp_path, LAYOUTS[layout])
    network = Network(spec_of(model.directory), source_of(model.directory), 64)
    shape = kv_layout(network.spec, BLOCK_SIZE, "float8_e4m3fn", max_groups=1)
    device = network.attach(torch.zeros(shape.pool_shape(5)).to(FP8))
    assert isinstance(device, CompiledDevice | CpuDevice)
    if isinstance(device, CompiledDevice):
        scales = [of_layer for _, of_layer in device.attention.layers]
    else:  # without the C++ kernels
        scales = [layer.scales for layer in device.attention.layers]
    assert scales == [expected] * NUM_LAYERS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_invalid_key_scale_is_refused(value: float, tmp_path: Path) -> None:
    model = write_fp8(tmp_path, LAYOUTS["fp8, tensors, static"])
    tensors = load_file(model.directory / "model.safetensors")
    tensors["model.layers.1.self_attn.kv_scale"].fill_(value)
    save_file(tensors, model.directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1\.self_attn\.kv_scale is {value}; KV scales must be finite"):
        Network(spec_of(model.directory), source_of(model.directory), 64)


@pytest.mark.parametrize("name", ["compressed-tensors, rows", "compressed-tensors, blocks"])
def test_fp8_output_head_is_multiplied_in_16_bits(name: str, tmp_path: Path) -> None:
    layout = replace(LAYOUTS[name], config={**LAYOUTS[name].config, "ignore": []})
    model = write_fp8(tmp_path, layout, is_fp8=lambda module: module.endswith(("_proj", "lm_head")))
    check_files(model.directory)
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    valid = [1] if "blocks" in name else [1, 2, 4]
    assert valid_tensor_parallel_sizes(spec_of(model.directory)) == valid


MINISTRAL3 = Layout(
    {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
     "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
    of_all, "weight_scale_inv", torch.bfloat16, "activation_scale",
)  # fmt: skip


def test_fp8_ministral3_loads_inside_its_wrapper(tmp_path: Path) -> None:
    """The published files have scalar scales in bfloat16 and the names of a wrapper."""
    model = write_fp8(tmp_path, MINISTRAL3, NATIVE["ministral3"])
    path = model.directory / "model.safetensors"
    wrapped = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**wrapped, "vision_tower.patch_conv.weight": torch.zeros(1)}, path)
    config = json.loads((model.directory / "config.json").read_text())
    outer = {"model_type": "mistral3", "quantization_config": config.pop("quantization_config"), "text_config": config}
    (model.directory / "config.json").write_text(json.dumps(outer))
    check_files(model.directory)
    assert torch.equal(logits_by_fp8_linear(model.directory), exact_logits(model))
    assert {linear.input_scale for linear in ReferenceLinear.made} == {0.25, 0.125}
