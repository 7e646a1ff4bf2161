"""The Triton rotation and KV store against float64 and complex rotation, and the bytes of the pool."""

import pytest
import torch

from bench.kernel.cases import measure_error, rounding_tolerance
from kernels.rotary_embedding import RotaryInput, rotate_and_store_reference, rotate_and_store_triton, rotate_reference

BLOCK_SIZE = 8


def angle_table(max_len: int, head_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_len).double()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def empty_pool(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((6, 3, 2, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 8, 128), (4, 1, 80), (2, 2, 16)])
def test_rotary_embedding_rotates_in_place_and_stores(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    before = qkv.clone()
    positions, table = torch.tensor([0, 1, 255, 17, 17, 3]), angle_table(256, head_dim)
    slots = [6 * BLOCK_SIZE - 1, 0, -1, BLOCK_SIZE, 2 * BLOCK_SIZE - 1, 3]
    pool = empty_pool(num_kv_heads, head_dim, dtype)
    rotate_and_store_triton(RotaryInput(qkv, positions, table, pool[:, 1, 0], pool[:, 1, 1], torch.tensor(slots)))

    rotated = num_heads + num_kv_heads
    exact = rotate_reference(before[:, :rotated].double(), positions, table.double())
    error = measure_error(qkv[:, :rotated], exact, rounding_tolerance(dtype))
    assert error.passed, error
    assert torch.equal(qkv[:, rotated:], before[:, rotated:])
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK_SIZE)
            assert torch.equal(pool[block, 1, 0, :, offset], qkv[token, num_heads:rotated])
            assert torch.equal(pool[block, 1, 1, :, offset], qkv[token, rotated:])
    assert pool.isfinite().sum() == 5 * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("scales", [None, torch.linspace(1, 3, 16)], ids=["unscaled", "scaled queries"])
def test_rotary_embedding_matches_the_reference(scales: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(4, 4 + 2 * 2, 32, generator=generator)
    positions, slots, table = torch.tensor([9, 2, 0, 4]), torch.tensor([9, -1, 40, 7]), angle_table(16, 32)
    outcomes = []
    for operation in (rotate_and_store_triton, rotate_and_store_reference):
        pool, heads = empty_pool(2, 32, torch.float32), qkv.clone()
        caches = pool[:, 1, 0], pool[:, 1, 1]
        operation(RotaryInput(heads, positions, table, *caches, slots, query_scales=scales))
        outcomes.append((heads, pool))
    # Float32 products in another order: half a unit each.
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-6, atol=1e-6, equal_nan=True)
    rotated = rotate_reference(qkv[:, :6], positions, table)
    if scales is not None:
        rotated[:, :4] *= scales[positions, None, None]
    torch.testing.assert_close(outcomes[1][0][:, :6], rotated, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy, for inf - inf in masked lanes
def test_non_finite_values_are_stored_unchanged() -> None:
    qkv = torch.ones(1, 3, 16)
    qkv[0, 2] = torch.inf
    pool = empty_pool(1, 16, torch.float32)
    rotate_and_store_triton(
        RotaryInput(qkv, torch.tensor([3]), angle_table(4, 16), pool[:, 0, 0], pool[:, 0, 1], torch.tensor([8]))
    )
    assert torch.equal(pool[1, 0, 1, :, 0], torch.full((1, 16), torch.inf))


def test_pairs_are_rotated_as_complex_numbers() -> None:
    """Elements i and i + D / 2 are one complex number, multiplied by exp(i * angle)."""
    qkv = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
    heads, positions, table = qkv[:, :3].clone(), torch.tensor([5, 0, 99]), angle_table(100, 64)
    pool = empty_pool(1, 64, torch.float32)
    rotate_and_store_triton(RotaryInput(qkv, positions, table, pool[:, 0, 0], pool[:, 0, 1], torch.full((3,), -1)))
    numbers = torch.complex(heads[..., :32], heads[..., 32:])
    turned = numbers * torch.complex(table[positions, :32], table[positions, 32:])[:, None]
    torch.testing.assert_close(qkv[:, :3], torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-6, atol=1e-6)
