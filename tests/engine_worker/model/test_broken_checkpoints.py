"""Unusable model directories are refused with one sentence that names the cause, before torch is imported."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_worker.estimate import main as estimate
from engine_worker.model.preflight import check_files
from shared.model_files import ModelFilesError
from tests.engine_worker.execution.reference import write_model

SHARD = "model-00002-of-00007.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("sharded"), max_shard_size="200KB")
    assert (directory / SHARD).is_file()
    return directory


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SHARD)
    change(tensors)
    save_file(tensors, directory / SHARD)


def remove_weights(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()


def cut(directory: Path, keep: Callable[[int], int]) -> None:
    os.truncate(directory / SHARD, keep((directory / SHARD).stat().st_size))


def lie(directory: Path, **changes: object) -> None:
    """Write a false entry for one tensor in the shard's header."""
    content = (directory / SHARD).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[max(header)].update(changes)
    encoded = json.dumps(header).encode()
    (directory / SHARD).write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def rename_in_index(directory: Path, name: object) -> None:
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    change_json(directory / INDEX, weight_map={**weight_map, max(weight_map): name})


def first(tensors: dict[str, torch.Tensor]) -> str:
    return max(tensors)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json; expected a model directory"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json is not JSON"),
    "config is deep": (lambda d: (d / "config.json").write_text("[" * 100_000), r"config\.json is not JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), r"config\.json is not a JSON object"),
    "a shard is cut": (lambda d: cut(d, lambda size: size - 1), rf"{SHARD} \([\d,]+ bytes\) is not a complete safe"),
    "a header is cut": (lambda d: cut(d, lambda size: 40), rf"{SHARD} \(40 bytes\) is not a complete safetensors file"),
    "a shard is empty": (lambda d: cut(d, lambda size: 0), rf"{SHARD} \(0 bytes\) is not a complete safetensors file"),
    "a shard is missing": (lambda d: (d / SHARD).unlink(), rf"has no {SHARD}, required by {INDEX}"),
    "a header lies of a shape": (lambda d: lie(d, shape=[2**62, 2**62]), f"{SHARD} .* is not a complete safetensors"),
    "a header lies of a dtype": (lambda d: lie(d, dtype="Q4"), f"{SHARD} .* is not a complete safetensors file"),
    "a header lies of places": (lambda d: lie(d, data_offsets=[0, 2**40]), f"{SHARD} .* is not a complete safetensors"),
    "the index names another": (
        lambda d: rename_in_index(d, "model-00009.safetensors"), r"no model-00009\.safetensors, required by model\.safe"
    ),
    "the index leads away": (lambda d: rename_in_index(d, "../x.safetensors"), "weight_map must map each tensor to"),
    "the index has numbers": (lambda d: rename_in_index(d, 3), "weight_map must map each tensor to a file"),
    "the index has no map": (lambda d: (d / INDEX).write_text("{}"), "weight_map must map each tensor to a file"),
    "a tensor is missing": (
        lambda d: change_tensors(d, lambda t: t.pop(first(t))), r"have no model\.layers\.\S+, required by config\.json"
    ),
    "a tensor is another's": (
        lambda d: change_tensors(d, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(192)})),
        r"does not use model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "a tensor has another shape": (
        lambda d: change_tensors(d, lambda t: t.update({first(t): torch.zeros(3, 5)})),
        r"has shape \(3, 5\); config\.json requires \(\d+",
    ),
    "a tensor is quantized": (
        lambda d: change_tensors(d, lambda t: t.update({first(t): t[first(t)].to(torch.float8_e4m3fn)})),
        rf"is F8_E4M3 in {SHARD}; supported: F32, F16, BF16",
    ),
    "a tensor is there twice": (
        lambda d: change_tensors(d, lambda t: t.update({"lm_head.weight": torch.zeros(1000, 96)})),
        r"lm_head\.weight is in model-\S+ and in model-\S+",
    ),
    "weights of another kind": (
        remove_weights, r"no model\.safetensors; only safetensors weights are"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_error_names_the_cause(name: str, sharded: Path, tmp_path: Path) -> None:
    change, sentence = BROKEN[name]
    directory = Path(shutil.copytree(sharded, tmp_path / "model"))
    change(directory)
    with pytest.raises(ModelFilesError, match=sentence) as caught:
        check_files(directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_complete_checkpoint_passes(sharded: Path) -> None:
    check_files(sharded)


@pytest.mark.parametrize("name", ["no config", "a shard is cut", "a tensor is missing"])
def test_estimate_refuses_broken_checkpoints(
    name: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "model"))
    BROKEN[name][0](directory)
    assert estimate([str(directory)]) == 1
    assert capsys.readouterr().err.startswith("pagestream estimate: ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "no_such"}, "model_type .no_such. is not a causal language model"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config .'aqlm'. is not supported"),
    ],
)
def test_unsupported_architecture_is_refused(
    changes: dict[str, object], sentence: str, sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "model"))
    change_json(directory / "config.json", **changes)
    assert estimate([str(directory)]) == 1
    assert re.search(sentence, capsys.readouterr().err)


def test_worker_refuses_before_importing_torch(sharded: Path, tmp_path: Path) -> None:
    """Followers, which would be started earlier, do not import it either."""
    directory = Path(shutil.copytree(sharded, tmp_path / "model"))
    cut(directory, lambda size: size - 1)
    # This module shadows the real one and cannot be imported.
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    worker = subprocess.run(
        [sys.executable, "-m", "engine_worker", "--model", str(directory), "--redis-url", "redis://127.0.0.1:1",
         "--metrics-port", "0", "--tensor-parallel-size", "2"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert worker.returncode == 2
    assert f"cannot start: {directory / SHARD}" in worker.stderr and "torch was imported" not in worker.stderr
