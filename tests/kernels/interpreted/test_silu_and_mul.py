"""The Triton SiLU and GELU gates against float64."""

from collections.abc import Callable

import pytest
import torch

from bench.kernel.cases import measure_error, rounding_tolerance
from kernels.silu_and_mul import (
    gelu_tanh_and_mul_reference,
    gelu_tanh_and_mul_triton,
    silu_and_mul_reference,
    silu_and_mul_triton,
)

Gate = Callable[[torch.Tensor], torch.Tensor]
GATES = {
    "silu": (silu_and_mul_triton, silu_and_mul_reference),
    "gelu": (gelu_tanh_and_mul_triton, gelu_tanh_and_mul_reference),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # from a closed GELU gate
@pytest.mark.parametrize(("gate", "reference"), GATES.values(), ids=GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 1023), (2, 1024), (2, 1536)])
def test_silu_and_mul_equals_float64_within_one_rounding(
    num_rows: int, width: int, dtype: torch.dtype, gate: Gate, reference: Gate
) -> None:
    rows = 3 * torch.randn(num_rows, 2 * width + 16, generator=torch.Generator().manual_seed(0))
    rows[:, 2 * width :] = torch.nan
    x = rows.to(dtype)[:, : 2 * width]
    error = measure_error(gate(x), reference(x.double()), rounding_tolerance(dtype))
    assert error.passed, error


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("gate", [silu_and_mul_triton, gelu_tanh_and_mul_triton])
def test_gate_beyond_the_exp_range_is_zero_or_identity(gate: Gate) -> None:
    # exp(200) is infinite in float32; -200 / inf is -0, and never NaN.
    x = torch.tensor([[-200.0, 200.0, 5.0, 5.0]])
    assert gate(x).tolist() == [[0.0, 1000.0]]
