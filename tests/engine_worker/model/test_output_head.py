"""The head's logits are float32 sums on every device, so that close logits stay distinct."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_worker.model.quantization.dense_cpu import CpuHead

ROOT = Path(__file__).parents[3]
TWO_BFLOAT16_ROUNDINGS = 2.0**-16  # inputs are split into two parts of 8 bits; float32 sums of 512 terms are more exact


def exact_logits(dtype: torch.dtype, num_rows: int) -> tuple[torch.Tensor, CpuHead, torch.Tensor]:
    """Return x, a head of 1,000 tokens, and the exact logits."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 512, generator=generator).to(dtype)
    weight = torch.randn(1000, 512, generator=generator).to(dtype)
    return x, CpuHead(weight), x.double() @ weight.double().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 64])
def test_logits_are_summed_in_float32(dtype: torch.dtype, num_rows: int) -> None:
    x, head, exact = exact_logits(dtype, num_rows)
    logits = head(x)
    assert logits.dtype == torch.float32 and logits.shape == exact.shape
    scale = exact.abs().max() if num_rows else 1.0
    torch.testing.assert_close(logits.double(), exact, rtol=TWO_BFLOAT16_ROUNDINGS, atol=float(1e-6 * scale))


def test_logits_equal_in_bfloat16_are_distinguished() -> None:
    """25.360 and 25.262 round to 25.375 and 25.25, which are adjacent bfloat16 values; closer logits are equal."""
    weight = torch.zeros(3, 512, dtype=torch.bfloat16)
    weight[0, :2] = torch.tensor([25.25, 0.03])
    weight[1, :2] = torch.tensor([25.25, 0.05])
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    assert len(set((x @ weight.T).flatten().tolist())) == 2, "rounded, they are equal"
    logits = CpuHead(weight)(x)
    assert logits.argmax() == 1 and logits[0, 0] < logits[0, 1]


NO_AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor does without AMX anyway")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("isa", ["DEFAULT", pytest.param("AVX512_CORE_BF16", marks=NO_AMX)])
def test_answers_are_equal_with_and_without_cache(demo_model_dir: Path, isa: str) -> None:
    """README's question in bfloat16; ONEDNN_MAX_CPU_ISA disables AMX.

    The first token is "The" or "L": their float32 logits differ by 0.1, less than a processor's rounding of the layers.
    """
    command = [sys.executable, "-m", "tests.engine_worker.execution.readme_question", str(demo_model_dir), "bfloat16"]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)["bfloat16"]
    assert len(set(found["answers"])) == 1 and found["answers"][0]
    assert found["cached_tokens"] > 16
