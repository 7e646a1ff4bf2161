"""Two ranks have one model where all that says how its weights are read is the same."""

from pathlib import Path

import pytest

from engine_worker.execution.same_model import fingerprint


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "model-00001-of-00002.safetensors"])
def test_another_file_is_another_model(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("says nothing of weights")
    assert fingerprint(tmp_path) == before
    (tmp_path / file).write_text('{"other": 1}')
    assert fingerprint(tmp_path) != before
