"""Dequantized 4-bit weights are exact in float32."""

import pytest
import torch

from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.weights import exact_weight, pack_w4


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "group", "is_gated"), [(64, 128, 32, False), (128, 256, 128, True)])
def test_dequantized_weight_is_exact(rows: int, inputs: int, group: int, *, is_gated: bool, has_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (rows, inputs), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(16, (rows, inputs // group), dtype=torch.uint8, generator=generator) if has_zeros else None
    packed = pack_w4(values, torch.rand(rows, inputs // group, generator=generator).half(), zeros, is_gated=is_gated)
    assert torch.equal(dequantize(packed, torch.float32), exact_weight(packed))
