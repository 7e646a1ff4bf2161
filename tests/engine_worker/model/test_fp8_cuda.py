"""fp8 through the whole engine on a GPU with --deterministic: a row's bits depend only on its sequence.

Covers graphs of no step, of decode steps and of all steps, batches, chunks, preemption and takeover, weight scales per
128 x 128 block and per row, and keys and values in bfloat16 and e4m3.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, write_fp8

ROOT = Path(__file__).parents[3]
# Every part of a fused layer starts at a block, so none stays in 16 bits; 256 inputs are two blocks, 512 are four.
MODEL = Case("llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 1024})  # fmt: skip
NUM_LINEAR_LAYERS = 3 * 4  # three layers: qkv, output, gate and up, down


def outputs_of(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine_worker.model.fp8_schedules", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_outputs(kv: str, outputs: dict[str, Any]) -> None:
    expected = outputs["all at once, graphs none"]["outputs"]
    assert all(len(tokens) == len(scores) == 40 for tokens, scores in expected.values())
    for schedule, found in outputs.items():
        assert found["outputs"] == expected, (kv, schedule)
        assert (found["preemptions"] > 0) == schedule.startswith("preempted"), (kv, schedule)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["fp8, blocks", "compressed-tensors, rows"])
def test_fp8_bits_do_not_depend_on_the_schedule(layout: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("--deterministic with fp8 has tiles for an H100 and an H200")
    result = outputs_of(write_fp8(tmp_path, LAYOUTS[layout], MODEL).directory)
    assert result["linear_layers"] == NUM_LINEAR_LAYERS
    assert len(result["kv"]["fp8"]) == 15
    for kv, outputs in result["kv"].items():
        check_outputs(kv, outputs)
    assert result["kv"]["fp8"] != result["kv"]["bf16"]
