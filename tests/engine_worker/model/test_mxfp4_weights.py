"""MXFP4 checkpoints of gpt-oss give the logits of the same model in float32, on one rank and on two."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine_worker.model.implementation import blueprint_from_directory
from engine_worker.model.network import Network
from engine_worker.model.preflight import check_files
from engine_worker.model.quantization import grouped
from engine_worker.model.quantization.mxfp4 import Mxfp4Method, dequantized
from engine_worker.model.spec import ModelSpec, kv_layout
from engine_worker.model.tensor_parallel import SINGLE, TensorParallel
from engine_worker.model.weights import RandomWeights, SafetensorsWeights
from shared.model_files import ModelFilesError
from tests.engine_worker.model.families import write_family
from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.named_weights import BLOCK_SIZE, step
from tests.engine_worker.model.ranks import Ranks

EXPERTS, HIDDEN, INNER = 6, 128, 64
CASE = Case("gpt_oss", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_size": HIDDEN,
                        "intermediate_size": INNER, "sliding_window": 9})  # fmt: skip
# Of the deviation of the logits. Rows of inputs have 16 bits, and gates up to 7 * 8 amplify their rounding: 1.1e-3.
ROUNDING = 2e-3
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
PROMPT = [(7 * index * index + 3) % 1000 for index in range(24)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model in MXFP4, and the same in float32 as transformers writes it."""
    exact = write_family(tmp_path_factory.mktemp("gpt_oss") / "exact", CASE)
    packed, generator = exact.with_name("mxfp4"), torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    multiplied: dict[str, Tensor] = {}
    for name, tensor in load_file(exact / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = multiplied[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        multiplied[name] = dequantized(blocks, scales).float().transpose(1, 2).contiguous()
    packed.mkdir()
    config = json.loads((exact / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": PUBLISHED}))
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(multiplied, exact / "model.safetensors", {"format": "pt"})
    return packed, exact


def logits(ranks: TensorParallel, directory: Path, quantization: str = "auto") -> tuple[Tensor, int]:
    """Return the logits of two steps, and the bytes of the loaded weights."""
    weights = SafetensorsWeights(directory, torch.device("cpu"), torch.float32, lambda share, detail: None)
    found = blueprint_from_directory(directory, "native", quantization)
    model = found.build(weights, 64, is_deterministic=False, tensor_parallel=ranks)
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    device = model.attach(torch.zeros(layout.pool_shape(5)))
    return torch.cat((model.forward(step(0, PROMPT), device), model.forward(step(len(PROMPT), [5]), device))), (
        weights.loaded_bytes
    )


@pytest.mark.parametrize("quantization", ["auto", "mxfp4", "none"])
@pytest.mark.parametrize("why_no_kernels", ["", "no compiler"])
def test_mxfp4_logits_equal_those_of_float32(
    directories: tuple[Path, Path], quantization: str, why_no_kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, exact = directories
    check_files(packed, quantization=quantization)
    monkeypatch.setattr(grouped, "why_no_kernels", lambda: why_no_kernels)
    found, loaded_bytes = logits(SINGLE, packed, quantization)
    wanted = logits(SINGLE, exact)[0]
    # C++ multiplies the exact weights with inputs of 16 bits.
    is_exact = why_no_kernels or quantization == "none"
    assert (found - wanted).abs().max() <= (0.0 if is_exact else ROUNDING * wanted.std())
    assert loaded_bytes == blueprint_from_directory(packed, "native", quantization).weights_bytes(1, 4)


def test_packed_experts_give_the_logits_of_the_stored_bytes(directories: tuple[Path, Path]) -> None:
    """The form for CUDA, with the kernels' references."""
    spec = blueprint_from_directory(directories[0], "native").shape
    assert isinstance(spec, ModelSpec)
    weights = SafetensorsWeights(directories[0], torch.device("cpu"), torch.float32, lambda share, detail: None)
    model = Network(spec, weights, 64, method=Mxfp4Method(spec.quantization, "cuda"))
    weights.check_all_used()
    layout = kv_layout(model.spec, BLOCK_SIZE, "float32", max_groups=1)
    device = model.attach(torch.zeros(layout.pool_shape(5)))
    found, expected = model.forward(step(0, PROMPT), device), logits(SINGLE, directories[0])[0][: len(PROMPT)]
    assert (found - expected).abs().max() <= ROUNDING * expected.std()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.mark.tp
def test_two_ranks_share_mxfp4_experts(ranks: Ranks, directories: tuple[Path, Path]) -> None:
    """Half of 64 inner columns would cut a tile, so each rank has half of the experts."""
    expected, all_bytes = logits(SINGLE, directories[0])
    found = ranks.run(2, logits, directories[0])
    assert (found[0][0] - expected).abs().max() <= ROUNDING * expected.std()
    assert all(loaded_bytes < 0.75 * all_bytes for _, loaded_bytes in found)


def test_dequantized_values_equal_those_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    scales = torch.tensor(
        [2, 60, 110, 120, 127, 130, 140, 150, 160, 170, 180, 190, 200, 210, 230, 252], dtype=torch.uint8
    )
    found = dequantized(blocks, scales.view(1, 4, 4))
    expected = convert_moe_packed_tensors(blocks, scales.view(1, 4, 4), dtype=torch.bfloat16)
    assert torch.equal(found.transpose(1, 2), expected)


def test_dummy_mxfp4_weights_have_the_usual_deviation(directories: tuple[Path, Path]) -> None:
    source = RandomWeights(torch.device("cpu"), torch.float32)
    blocks = source.get("x.down_proj_blocks", (2, 64, 4, 16), dtype=torch.uint8)
    scales = source.get("x.down_proj_scales", (2, 64, 4), dtype=torch.uint8)
    assert 0.015 < dequantized(blocks, scales).float().std() < 0.03


@pytest.mark.parametrize(("suffix", "rows"), [("_blocks", 2), ("_scales", 1)])
def test_cut_mxfp4_tensor_is_refused(directories: tuple[Path, Path], tmp_path: Path, suffix: str, rows: int) -> None:
    tensors = load_file(directories[0] / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj{suffix}"
    tensors[name] = tensors[name][:, :-rows].contiguous()
    (tmp_path / "config.json").write_text((directories[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=rf"{name} has shape"):
        check_files(tmp_path)


def test_mxfp4_tensor_of_another_type_is_refused(directories: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(directories[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].float()
    (tmp_path / "config.json").write_text((directories[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=rf"{name} is F32 .* mxfp4 requires U8"):
        check_files(tmp_path)
