"""The Triton kernel that adds a gated shared expert equals the reference, and a row does not depend on others."""

import pytest
import torch

from kernels.moe.shared_gate import add_gated_reference
from kernels.moe.shared_gate_triton import add_gated_triton


@pytest.mark.parametrize("size", [96, 1024, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_add_gated_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    outputs, shared, x = (torch.randn(5, size, generator=generator).to(dtype) for _ in range(3))
    weight = (torch.randn(size, generator=generator) / size**0.5).to(dtype)
    found = add_gated_triton(outputs, shared, x, weight)
    expected = add_gated_reference(outputs.double(), shared.double(), x.double(), weight.double())
    # Sums of up to 2,000 float32 products, and one rounding of the result.
    torch.testing.assert_close(found.double(), expected, atol=1e-6 if dtype == torch.float32 else 2e-3, rtol=0)
    alone = add_gated_triton(outputs[3:4], shared[3:4], x[3:4], weight)
    assert torch.equal(alone, found[3:4])
