"""Weights from single and sharded files; missing, misshapen and unexpected ones are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.model.architectures import spec_from_directory
from engine_worker.model.checkpoint_tensors import checkpoint_tensors
from engine_worker.model.network import Network
from engine_worker.model.weights import RandomWeights, SafetensorsWeights
from tests.engine_worker.execution.reference import write_model

CPU = torch.device("cpu")


def source(directory: Path, reports: list[float] | None = None) -> SafetensorsWeights:
    progress = [] if reports is None else reports
    return SafetensorsWeights(directory, CPU, torch.float32, lambda share, detail: progress.append(share))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_sharded_files_give_the_same_weights(model_dir: Path, tmp_path: Path) -> None:
    sharded_dir = write_model(tmp_path, max_shard_size="200KB")
    assert len(list(sharded_dir.glob("*.safetensors"))) > 1
    config = spec_from_directory(model_dir)
    shapes = checkpoint_tensors(config)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert torch.equal(source(model_dir).get(name, shapes[name]), source(sharded_dir).get(name, shapes[name]))


def test_every_weight_is_used_and_progress_is_reported(model_dir: Path) -> None:
    reports: list[float] = []
    weights = source(model_dir, reports)
    Network(spec_from_directory(model_dir), weights, max_len=8)
    weights.check_all_used()
    assert reports == sorted(reports) and len(reports) >= 5 and reports[-1] > 0.9
    assert weights.loaded_bytes == sum(tensor.nbytes for tensor in load_file(model_dir / "model.safetensors").values())


def test_unexpected_weight_is_refused(model_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, bias: torch.zeros(192)}, tmp_path / "model.safetensors")
    weights = source(tmp_path)
    Network(spec_from_directory(model_dir), weights, max_len=8)
    with pytest.raises(ValueError, match=bias):
        weights.check_all_used()


def test_missing_and_misshapen_weights_are_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="no_such"):
        source(model_dir).get("no_such.weight", (1,))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(96,\).*\(97,\)"):
        source(model_dir).get("model.norm.weight", (97,))


def test_absent_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        source(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{broken")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        source(tmp_path)


def test_random_weights_depend_only_on_name_and_seed() -> None:
    first = RandomWeights(CPU, torch.float32).get("a", (8, 8))
    assert torch.equal(RandomWeights(CPU, torch.float32).get("a", (8, 8)), first)
    assert not torch.equal(RandomWeights(CPU, torch.float32).get("b", (8, 8)), first)
    assert not torch.equal(RandomWeights(CPU, torch.float32, seed=1).get("a", (8, 8)), first)
    assert torch.equal(RandomWeights(CPU, torch.float32).get("norm", (8,)), torch.ones(8))
