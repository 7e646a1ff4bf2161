"""--deterministic on a GPU, two layers of Llama 8B's shape: a row's bits do not depend on its batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_logits_depend_only_on_their_sequence(tmp_path: Path) -> None:
    # In its own process, since the settings must be made before CUDA starts.
    command = ["-m", "bench", "batch-invariance", "--deterministic", "--num-layers", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "batch_invariance_deterministic.json").read_text())
    same = {"decode_batches": [], "alone": [], "chunks": False, "decode_against_prefill": False, "slots": False}
    assert result["other_bits"] == same
