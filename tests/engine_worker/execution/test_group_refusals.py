"""Invalid tensor-parallel groups are refused before weights are read and before a follower starts."""

from pathlib import Path

import pytest
import torch

from engine_worker.execution.load import load_replica, rank_group
from engine_worker.execution.load.load import load_model_runner
from engine_worker.execution.load.load_replica import check_alike
from engine_worker.execution.settings import ExecutionSettings
from shared.settings import SettingsError
from tests.engine_worker.execution.reference import write_model

pytestmark = pytest.mark.tp


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights are read, or a process is started")

    monkeypatch.setattr(rank_group, "Followers", refuse)
    monkeypatch.setattr(load_replica, "SafetensorsWeights", refuse)


def load(model_dir: Path, size: int, **changes: str) -> None:
    settings = ExecutionSettings(model=model_dir, tensor_parallel_size=size, **{"device": "cpu", **changes})  # type: ignore[arg-type]
    load_model_runner(settings, lambda phase, progress, detail: None)


@pytest.mark.parametrize("size", [0, -2])
def test_group_size_below_one_is_refused(model_dir: Path, size: int) -> None:
    with pytest.raises(SettingsError, match=rf"--tensor-parallel-size: expected at least 1, got {size}"):
        load(model_dir, size)


@pytest.mark.parametrize("size", [4, 5])
def test_group_size_not_dividing_model_names_valid_sizes(model_dir: Path, size: int) -> None:
    with pytest.raises(ValueError, match=r"--tensor-parallel-size.* 1.* 2"):
        load(model_dir, size)


def test_group_transformers_model_allows_one_rank(model_dir: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="--tensor-parallel-size"):
        load(model_dir, 2, model_impl="transformers")


def has_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_group_larger_than_gpu_count_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    has_gpus(monkeypatch, *["H200"] * num_gpus)
    sentence = f"--tensor-parallel-size: expected at most {num_gpus}, got {num_gpus + 1}; this process sees"
    with pytest.raises(ValueError, match=sentence):
        load(model_dir, num_gpus + 1, device="cuda")


def test_group_with_different_gpus_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_alike(["H200", "H200"])
    has_gpus(monkeypatch, "H200", "A10")
    with pytest.raises(
        ValueError, match="--tensor-parallel-size 2: the GPUs of a group must be alike; found H200, A10"
    ):
        load(model_dir, 2, device="cuda", dtype="bfloat16")
