"""Ranks of a group refuse to start with different model files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_worker.execution.ranks.same_model import check_same_model


class TwoRanks:
    """Compares its own checksum with that of another rank."""

    def __init__(self, other: int | None = None) -> None:
        self.rank, self.size, self.other, self.own = 0, 2, other, 0

    def minimum(self, value: int) -> int:
        if value > 0:
            self.own = value
        return value if self.other is None else min(value, self.other if value > 0 else -self.other)


def compared(directory: Path, other: int | None = None) -> int:
    ranks: Any = TwoRanks(other)
    check_same_model(directory, "auto", ranks)
    return ranks.own


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "model.safetensors"])
def test_same_model_different_file_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    first = compared(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert compared(tmp_path, other=first) == first
    if file.endswith(".json"):
        (tmp_path / file).write_text('{"other": 1}')
    else:
        save_file({"w": np.ones(4, np.float32)}, tmp_path / file)
    with pytest.raises(ValueError, match="the ranks have different files"):
        compared(tmp_path, other=first)


def test_different_files_of_a_draft_head_name_its_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    ranks: Any = TwoRanks(other=1)
    with pytest.raises(ValueError, match="--speculative-config: model: the ranks have different files"):
        check_same_model(tmp_path, "auto", ranks, "--speculative-config: model")
