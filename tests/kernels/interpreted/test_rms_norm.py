"""The Triton RMSNorm against float64, alone and fused with the residual addition."""

import pytest
import torch

from bench.kernel.cases import measure_error, rounding_tolerance
from kernels.rms_norm import add_rms_norm_triton, rms_norm_reference, rms_norm_triton

CASES = pytest.mark.parametrize(
    ("num_rows", "hidden", "dtype"),
    [(1, 576, torch.float32), (5, 576, torch.float16), (3, 4096, torch.float16), (2, 100, torch.float32)],
)


def random(num_rows: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a strided view; the columns after a row must not be read."""
    rows = torch.randn(num_rows, hidden + 32, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows[:, hidden:] = torch.nan
    return rows[:, :hidden]


@CASES
def test_rms_norm_equals_float64_within_one_rounding(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, hidden, dtype, 0), random(1, hidden, dtype, 1)[0]
    error = measure_error(
        rms_norm_triton(x, weight, 1e-5),
        rms_norm_reference(x.double(), weight.double(), 1e-5),
        rounding_tolerance(dtype),
    )
    assert error.passed, error


@CASES
def test_rms_norm_with_residual_equals_add_then_norm(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = random(num_rows, hidden, dtype, 0), random(num_rows, hidden, dtype, 2)
    weight = random(1, hidden, dtype, 1)[0]
    normed, new_residual = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rms_norm_triton(x + residual, weight, 1e-5))


def test_eps_matters_in_rows_near_zero() -> None:
    x, weight = torch.full((1, 64), 1e-3), torch.ones(64)
    # mean(x^2) = 1e-6 against eps = 1e-6: x / sqrt(2e-6)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), torch.full((1, 64), 0.5**0.5), rtol=1e-6, atol=0)
