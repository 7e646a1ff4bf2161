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
NUM_PRODUCTS = 3 * 4  # three layers: qkv, output, gate and up, down


def ways_of(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine_worker.model.fp8_schedules", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def check_ways(kv: str, ways: dict[str, Any]) -> None:
    expected = ways["all at once, graphs none"]["outputs"]
    assert all(len(tokens) == len(scores) == 40 for tokens, scores in expected.values())
    for way, found in ways.items():
        assert found["outputs"] == expected, (kv, way)
        assert (found["preemptions"] > 0) == way.startswith("preempted"), (kv, way)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["fp8, blocks", "compressed-tensors, rows"])
def test_fp8_bits_do_not_depend_on_the_schedule(layout: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("--deterministic with fp8 has tiles for an H100 and an H200")
    told = ways_of(write_fp8(tmp_path, LAYOUTS[layout], MODEL).directory)
    assert told["products"] == NUM_PRODUCTS
    assert len(told["kv"]["fp8"]) == 15
    for kv, ways in told["kv"].items():
        check_ways(kv, ways)
    assert told["kv"]["fp8"] != told["kv"]["bf16"]
