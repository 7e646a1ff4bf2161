"""Packed 4-bit weights keep every number; sizes that the kernels do not know are named."""

import pytest
import torch

from kernels.w4a16.weights import Offset, exact_weight, pack_w4, why_not_packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", Offset)
@pytest.mark.parametrize(
    ("rows", "inputs", "group", "is_gated"),
    [(128, 256, 128, False), (4096, 128, 64, True), (64, 128, 32, False), (192, 256, 128, True)],
)
def test_packed_weight_is_exact(
    rows: int, inputs: int, group: int, *, is_gated: bool, offset: Offset, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (rows, inputs), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(rows, inputs // group, generator=generator) + 0.01).to(dtype)
    others = torch.randint(16, (rows, inputs // group), dtype=torch.uint8, generator=generator)
    minima = (-scales * others).to(dtype)
    arguments = {Offset.NONE: {}, Offset.ZERO_POINT: {"zeros": others}, Offset.MINIMUM: {"minima": minima}}[offset]
    packed = pack_w4(values, scales, **arguments, is_gated=is_gated)
    added = minima.float() if offset is Offset.MINIMUM else torch.zeros_like(scales, dtype=torch.float32)
    zeros = {Offset.NONE: torch.full_like(others, 8), Offset.ZERO_POINT: others}.get(offset, torch.zeros_like(others))
    numbers = values.view(rows, -1, group).float() - zeros.float()[..., None]
    assert torch.equal(exact_weight(packed), (numbers * scales.float()[..., None] + added[..., None]).flatten(1))
    assert packed.shape == (rows, inputs)
    assert packed.nbytes == rows * inputs // 2 + scales.nbytes * (1 if offset is Offset.NONE else 2)


@pytest.mark.parametrize(
    ("shape", "group", "reason"),
    [
        ((96, 256), 128, "it has 96 outputs and 256 inputs, and the kernels need multiples of 64"),
        ((64, 96), 32, "it has 64 outputs and 96 inputs"),
        ((64, 192), 16, "its groups have 16 inputs, and the kernels know 128, 64, 32"),
    ],
)
def test_other_sizes_are_named(shape: tuple[int, int], group: int, reason: str) -> None:
    assert why_not_packed(shape, group).startswith(reason)
    values, scales = torch.zeros(shape, dtype=torch.uint8), torch.ones(shape[0], shape[1] // group).half()
    with pytest.raises(ValueError, match=reason):
        pack_w4(values, scales, None, is_gated=False)
