"""Measure one model with both implementations; too few tokens are an error."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from tests.engine_worker.execution.reference import write_model
from tests.tiny_model import VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(write_tiny_model(tmp_path_factory.mktemp("models") / "model"), vocab_size=VOCAB_SIZE)


def test_too_few_tokens_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        main(["model-impls", str(model), "--out", str(out), "--batches", "1", "--tokens", "8", "--rounds", "1"])
    assert ended.value.code == 2 and not out.exists()
    assert "no steady step to measure" in capsys.readouterr().err


@pytest.mark.e2e  # reads the commit from git
def test_figures_cover_both_implementations(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert (
        main(["model-impls", str(model), "--out", str(out), "--batches", "1", "--tokens", "16", "--rounds", "1"]) == 0
    )
    (figures,) = json.loads(out.read_text())["batches"]
    assert figures["native"]["steps"] > 0 and figures["transformers"]["steps"] > 0
