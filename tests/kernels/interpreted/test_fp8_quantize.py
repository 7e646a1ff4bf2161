"""Kernels that quantize rows to 8-bit floats, alone and fused, against the reference.

The interpreter rounds 3 % of float32 values differently from a GPU, one of them by half its value. So inputs compared
with the reference are 8-bit floats times powers of two, which need no rounding; gpu_check.py checks the GPU's
rounding.
"""

import pytest
import torch

from kernels.fp8_kv import E4M3_MAX
from kernels.fp8_quantize import quantize_groups, quantize_rows
from kernels.rms_norm import add_rms_norm_quantized, add_rms_norm_triton
from kernels.scaled import GROUP, Scaled, quantize_groups_reference, quantize_rows_reference
from kernels.silu_and_mul import silu_and_mul_quantized, silu_and_mul_triton


def random(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return a strided view of rows of different magnitudes; the columns after a row must not be read."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width + 16, generator=generator) * torch.logspace(-3, 1, num_rows)[:, None]
    rows[:, width:] = torch.nan
    return rows.half()[:, :width]


def representable(num_rows: int, width: int) -> torch.Tensor:
    """Return rows of float8_e4m3fn times a power of two per 128 elements; each contains 448."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(256, (num_rows, width // GROUP, GROUP), dtype=torch.uint8, generator=generator)
    values = bits.view(torch.float8_e4m3fn).float().nan_to_num(1.5)
    values[:, :, 7] = -E4M3_MAX
    return (values * 2.0 ** torch.randint(-9, 4, (num_rows, width // GROUP, 1), generator=generator)).flatten(1)


def same(found: Scaled, expected: Scaled) -> bool:
    values = torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    return values and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 640), (2, 1536)])
def test_quantized_groups_match_the_reference(num_rows: int, width: int) -> None:
    x = representable(num_rows, width)
    found = quantize_groups(x)
    assert same(found, quantize_groups_reference(x))
    assert torch.equal(found.exact_rows(), x)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_quantized_rows_match_the_reference(num_rows: int) -> None:
    x = representable(num_rows, GROUP)
    found = quantize_rows(x)
    assert same(found, quantize_rows_reference(x))
    assert torch.equal(found.exact_rows(), x)


def test_largest_element_is_448_and_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 256, dtype=torch.float16)
    x[0, 5], x[0, 200] = -3.0, 0.75
    of_rows, of_groups = quantize_rows(x), quantize_groups(x)
    assert of_rows.values[0, [5, 200]].tolist() == [-448.0, 112.0]
    assert of_groups.values[0, [5, 200]].tolist() == [-448.0, 448.0]
    assert of_groups.scales.shape == (2, 2), "a group is a row of scales: the layout that linear layers read"
    assert not of_rows.values[1].float().any() and not of_groups.exact_rows()[1].any()


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("num_rows", "width", "keeps_plain"), [(1, 128, True), (3, 640, True), (3, 640, False)])
def test_fused_norm_quantize_equals_norm_then_quantize(
    num_rows: int, width: int, keeps_plain: bool, is_grouped: bool
) -> None:
    x, residual, weight = random(num_rows, width), random(num_rows, width, 1), random(1, width, 2)[0]
    normed, new_residual = add_rms_norm_triton(x, residual, weight, 1e-5)
    found, added = add_rms_norm_quantized(x, residual, weight, 1e-5, is_grouped, keeps_plain)
    assert torch.equal(added, new_residual)
    assert (found.plain is not None and torch.equal(found.plain, normed)) if keeps_plain else found.plain is None
    assert same(found, quantize_groups(normed) if is_grouped else quantize_rows(normed))


@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 1000)])
def test_fused_silu_quantize_equals_silu_then_quantize(num_rows: int, width: int) -> None:
    x = random(num_rows, 2 * width)
    assert same(silu_and_mul_quantized(x), quantize_rows(silu_and_mul_triton(x)))
