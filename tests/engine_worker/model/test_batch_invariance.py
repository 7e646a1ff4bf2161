"""--deterministic on a GPU: a row's bits do not depend on its batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

# Shapes for which skinny_linear has no tiles: gates of a hybrid, and an output head that is no multiple of 64.
_LIBRARY_PRODUCTS = """
import sys
import torch
from engine_worker.execution.load.load_replica import use_batch_invariant_products
use_batch_invariant_products()
from engine_worker.model.quantization.dense_cuda import CudaHead, CudaLinear
torch.manual_seed(0)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for layer, outputs, inputs in ((CudaLinear, 96, 5120), (CudaLinear, 48, 5120), (CudaHead, 50257, 1024)):
        product = layer(torch.randn(outputs, inputs, device="cuda", dtype=dtype), is_deterministic=True)
        rows = torch.randn(300, inputs, device="cuda", dtype=dtype)
        together = product(rows)
        other = [count for count in range(1, 300) if not torch.equal(product(rows[:count]), together[:count])]
        if other:
            sys.exit(f"{layer.__name__} {outputs} x {inputs}, {dtype}: other bits with {other} rows")
"""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_logits_depend_only_on_their_sequence(tmp_path: Path) -> None:
    """Two layers of Llama 8B's shape, in their own process: the settings must be made before CUDA starts."""
    command = ["-m", "bench", "batch-invariance", "--deterministic", "--num-layers", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "batch_invariance_deterministic.json").read_text())
    same = {"decode_batches": [], "alone": [], "chunks": False, "decode_against_prefill": False, "slots": False}
    assert result["other_bits"] == same


def test_products_of_the_library_depend_only_on_their_row() -> None:
    subprocess.run([sys.executable, "-c", _LIBRARY_PRODUCTS], cwd=ROOT, check=True)
