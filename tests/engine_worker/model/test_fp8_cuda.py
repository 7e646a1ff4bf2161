"""fp8 through the whole engine on a GPU with --deterministic: a row's bits depend only on its sequence.

Covers graphs of no step, of decode steps and of all steps, batches, chunks, preemption and takeover, weight scales per
128 x 128 block and per row, and keys and values in bfloat16 and e4m3.
"""

from pathlib import Path

import pytest
import torch

from tests.engine_worker.model.family_cases import Case
from tests.engine_worker.model.fp8_checkpoints import LAYOUTS, write_fp8
from tests.engine_worker.model.quantized_schedules import check_outputs, results_of

# Every part of a fused layer starts at a block, so none stays in 16 bits; 256 inputs are two blocks, 512 are four.
MODEL = Case("llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
                       "num_key_value_heads": 2, "vocab_size": 1024})  # fmt: skip
NUM_LINEAR_LAYERS = 3 * 4  # three layers: qkv, output, gate and up, down


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["fp8, blocks", "compressed-tensors, rows"])
def test_fp8_bits_do_not_depend_on_the_schedule(layout: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("--deterministic with fp8 has tiles for an H100 and an H200")
    result = results_of(write_fp8(tmp_path, LAYOUTS[layout], MODEL).directory)
    assert result["linear_layers"] == NUM_LINEAR_LAYERS
    assert len(result["kv"]["fp8"]) == 15
    for kv, outputs in result["kv"].items():
        check_outputs(kv, outputs)
    assert result["kv"]["fp8"] != result["kv"]["bf16"]
