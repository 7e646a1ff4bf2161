"""The Triton rotary embedding against float64, and against rotation of complex numbers."""

import pytest
import torch

from bench.kernel_cases import measure_error, rounding_tolerance
from kernels.rotary_embedding import rotary_embedding_reference, rotary_embedding_triton


def angle_table(max_len: int, head_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_len).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 8, 128), (4, 1, 80), (2, 2, 16)])
def test_equals_float64_but_for_one_rounding(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    query, key, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    before = qkv.clone()
    positions = torch.tensor([0, 1, 255, 17, 17, 3], dtype=torch.int64)
    table = angle_table(256, head_dim)
    outputs = rotary_embedding_triton(query, key, positions, table)
    exact = rotary_embedding_reference(query.double(), key.double(), positions, table.double())
    for output, expected in zip(outputs, exact, strict=True):
        error = measure_error(output, expected, rounding_tolerance(dtype))
        assert error.passed, error
    assert torch.equal(qkv, before)


def test_pairs_are_rotated_as_complex_numbers() -> None:
    """The convention, stated a second way: element i and i + D / 2 are one complex number, times exp(i * angle)."""
    heads = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1))
    positions, table = torch.tensor([5, 0, 99]), angle_table(100, 64)
    rotated, _ = rotary_embedding_triton(heads, heads, positions, table)
    numbers = torch.complex(heads[..., :32], heads[..., 32:])
    turned = numbers * torch.complex(table[positions, :32], table[positions, 32:])[:, None]
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-6, atol=1e-6)
