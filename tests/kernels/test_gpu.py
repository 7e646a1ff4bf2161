"""The checks of bench/gpu_check.py as tests, on a machine with a GPU: bf16, fp16 and fp32 over the serving shapes."""

import pytest
import torch

from bench.gpu_check import Check, all_checks
from bench.sampling import run_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CHECKS = all_checks()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_kernel_on_the_gpu_equals_the_float64_reference(check: Check) -> None:
    for error in check(torch.Generator(device="cuda").manual_seed(0)):
        assert error.passed, error


def test_sampling_on_the_gpu_equals_the_reference() -> None:
    failed = [result for result in run_checks() if not result["passed"]]
    assert not failed
