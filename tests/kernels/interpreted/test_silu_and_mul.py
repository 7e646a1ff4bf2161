"""The Triton SiLU gate against float64."""

import pytest
import torch

from bench.kernel.cases import measure_error, rounding_tolerance
from kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 1023), (2, 1024), (2, 1536)])
def test_equals_float64_but_for_one_rounding(num_rows: int, width: int, dtype: torch.dtype) -> None:
    rows = 3 * torch.randn(num_rows, 2 * width + 16, generator=torch.Generator().manual_seed(0))
    rows[:, 2 * width :] = torch.nan
    x = rows.to(dtype)[:, : 2 * width]
    error = measure_error(silu_and_mul_triton(x), silu_and_mul_reference(x.double()), rounding_tolerance(dtype))
    assert error.passed, error


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_a_gate_beyond_the_range_of_exp_closes_or_passes() -> None:
    # exp(200) is infinite in float32; -200 / inf is -0, and never NaN.
    x = torch.tensor([[-200.0, 200.0, 5.0, 5.0]])
    assert silu_and_mul_triton(x).tolist() == [[0.0, 1000.0]]
