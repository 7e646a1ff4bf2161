"""Dequantized 4-bit weights are exact in float32."""

import pytest
import torch

from kernels.w4a16.dequantize import dequantize
from kernels.w4a16.weights import Offset, exact_weight, pack_w4


@pytest.mark.parametrize("offset", Offset)
@pytest.mark.parametrize(("rows", "inputs", "group", "is_gated"), [(64, 128, 32, False), (128, 256, 128, True)])
def test_dequantized_weight_is_exact(rows: int, inputs: int, group: int, *, is_gated: bool, offset: Offset) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (rows, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, inputs // group, generator=generator).half()
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8, generator=generator)
    others = {Offset.ZERO_POINT: {"zeros": zeros}, Offset.MINIMUM: {"minima": -(zeros * scales)}}
    packed = pack_w4(values, scales, **others.get(offset, {}), is_gated=is_gated)
    assert torch.equal(dequantize(packed, torch.float32), exact_weight(packed))
