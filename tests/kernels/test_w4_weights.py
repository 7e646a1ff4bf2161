"""Packed 4-bit weights keep every number; sizes that the kernels do not know are named."""

import pytest
import torch

from kernels.w4a16.weights import exact_weight, pack_w4, why_not_packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "group", "is_gated"),
    [(128, 256, 128, False), (4096, 128, 64, True), (64, 128, 32, False), (192, 256, 128, True)],
)
def test_packed_weight_is_exact(
    rows: int, inputs: int, group: int, *, is_gated: bool, has_zeros: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (rows, inputs), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(16, (rows, inputs // group), dtype=torch.uint8, generator=generator) if has_zeros else None
    scales = (torch.rand(rows, inputs // group, generator=generator) + 0.01).to(dtype)
    packed = pack_w4(values, scales, zeros, is_gated=is_gated)
    middles = torch.full_like(scales, 8) if zeros is None else zeros
    numbers = values.view(rows, -1, group).float() - middles.float()[..., None]
    assert torch.equal(exact_weight(packed), (numbers * scales.float()[..., None]).flatten(1))
    assert packed.shape == (rows, inputs)
    assert packed.nbytes == rows * inputs // 2 + scales.nbytes * (2 if has_zeros else 1)


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
