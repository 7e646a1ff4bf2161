"""What can be known of skinny_linear without a GPU: its reference, the table of tiles, and who is sent to it."""

import pytest
import torch

import kernels.skinny_linear_tiles as table
from kernels.dependent_launch import dependent_launch
from kernels.skinny_linear import MAX_ROWS, Tiles, gated_skinny_linear_reference, skinny_linear_reference

ENTRIES = [(shape, max_rows, tiles) for shape, choices in table.H200_TILES.items() for max_rows, tiles in choices]


@pytest.mark.parametrize(("shape", "max_rows", "tiles"), ENTRIES, ids=str)
def test_an_entry_cuts_its_product_without_remainder(shape: tuple[int, int, bool], max_rows: int, tiles: Tiles) -> None:
    num_outputs, num_inputs, is_gated = shape
    box = tiles.block_n // 2 if is_gated else tiles.block_n
    assert box % 64 == 0, "rows of a wgmma"
    assert num_outputs % box == 0 and num_inputs % tiles.block_k == 0 and max_rows <= MAX_ROWS


def test_entries_ascend() -> None:
    for choices in table.H200_TILES.values():
        rows = [max_rows for max_rows, _ in choices]
        assert rows == sorted(set(rows))


def weight(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, inputs, dtype=dtype, device="meta")


def test_shape_rows_and_device_alone_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = weight(6144, 4096)
    assert table.tiles_for(qkv, 1, is_gated=False) is None, "not on an unknown device"
    monkeypatch.setattr(table, "_is_known", lambda device: True)
    few, more = (tiles for _, tiles in table.H200_TILES[6144, 4096, False])
    chosen = {rows: table.tiles_for(qkv, rows, is_gated=False) for rows in (1, 16, 17, 64, 65)}
    assert chosen == {1: few, 16: few, 17: more, 64: more, 65: None}
    assert table.tiles_for(weight(28672, 4096), 100, is_gated=True) == Tiles(128, 64)
    assert table.tiles_for(weight(28672, 4096), 1, is_gated=False) is None
    assert table.tiles_for(weight(6144, 4096, torch.float16), 1, is_gated=False) is None


def test_the_references_round_where_the_kernel_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, both = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (3, 10))
    product = skinny_linear_reference(x, both)
    assert torch.equal(product, (x.float() @ both.float().T).bfloat16())
    gate, up = product.float().chunk(2, dim=-1)
    assert torch.equal(gated_skinny_linear_reference(x, both), (torch.nn.functional.silu(gate) * up).bfloat16())


def test_only_hopper_starts_kernels_early() -> None:
    assert dependent_launch(torch.empty(1)) == {"DEPENDENT": False, "launch_pdl": False}
    assert dependent_launch(weight(1, 1)) == {"DEPENDENT": True, "launch_pdl": True}
