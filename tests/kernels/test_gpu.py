"""The checks of bench gpu-check as tests on a machine with a GPU: bf16, fp16 and fp32 at the serving shapes."""

import pytest
import torch

from bench.kernel.cases import Check
from bench.kernel.gpu_check import all_checks
from bench.kernel.sampling import run_checks
from kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CHECKS = all_checks()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_gpu_kernel_equals_the_float64_reference(check: Check) -> None:
    for error in check(torch.Generator(device="cuda").manual_seed(0)):
        assert error.passed, error


def test_gpu_sampling_equals_the_reference() -> None:
    failed = [result for result in run_checks() if not result["passed"]]
    assert not failed


@pytest.mark.parametrize("vocab_size", [1000, 49152, 128256])
def test_gpu_token_masks_equal_the_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(32, vocab_size, generator=generator).bfloat16()
    masks = torch.randint(-(2**31), 2**31, (20, -(-vocab_size // 32)), dtype=torch.int32, generator=generator)
    rows = torch.randperm(32, generator=generator)[:20].int()
    found = scores.cuda()
    apply_token_bitmask(found, rows.cuda(), masks.cuda())
    apply_token_bitmask_reference(scores, rows, masks)
    assert torch.equal(found.cpu(), scores)
