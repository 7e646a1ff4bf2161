"""Rules of skinny_linear that need no GPU: its reference, the tile table and the supported shapes."""

from itertools import pairwise

import pytest
import torch

import kernels.skinny_linear_tiles as table
from bench.kernel.linear_shapes import all_shapes
from kernels.dependent_launch import dependent_launch
from kernels.skinny_linear import MAX_ROWS, Tiles, gated_skinny_linear_reference, skinny_linear_reference

ROWS = range(1, MAX_ROWS + 1)
# Measured models, and unmeasured sizes: odd head counts, a vocabulary that 64 does not divide.
SHAPES = [*all_shapes(), (576, 576, False), (1536, 576, True), (49_152, 576, False), (100_003, 4096, False)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_skinny_tiles_cover_a_matrix_exactly(shape: tuple[int, int, bool]) -> None:
    num_outputs, num_inputs, is_gated = shape
    for tiles in filter(None, (table.tiles_of(shape, num_rows) for num_rows in ROWS)):
        box = tiles.block_n // 2 if is_gated else tiles.block_n
        assert box % 64 == 0, "rows of a wgmma"
        assert num_outputs % box == 0 and num_inputs % tiles.block_k == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_change_at_most_at_three_row_counts(shape: tuple[int, int, bool]) -> None:
    """Otherwise a growing decode batch would be recompiled repeatedly."""
    chosen = [table.tiles_of(shape, num_rows) for num_rows in ROWS]
    changes = [rows for rows, (one, next_one) in enumerate(pairwise(chosen), start=1) if one != next_one]
    assert set(changes) <= {8, 16, 64}
    assert table.tiles_of(shape, MAX_ROWS + 1) is None


def test_table_entries_differ_from_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = dict(table.MEASURED)
    for choices in entries.values():
        rows = [max_rows for max_rows, _ in choices]
        assert rows == sorted(set(rows)) and all(number <= MAX_ROWS for number in rows)
    by_table = {shape: [table.tiles_of(shape, num_rows) for num_rows in ROWS] for shape in entries}
    monkeypatch.setattr(table, "MEASURED", {})
    by_rule = {shape: [table.tiles_of(shape, num_rows) for num_rows in ROWS] for shape in entries}
    assert all(by_rule[shape] != by_table[shape] for shape in entries)


def weight(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(rows, inputs, dtype=dtype, device="meta")


def test_tiles_depend_only_on_shape_rows_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = weight(6144, 4096)
    assert table.tiles_for(qkv, 1, is_gated=False) is None, "not on an unknown device"
    monkeypatch.setattr(table, "is_known", lambda device: True)
    few, more = Tiles(64, 256), Tiles(64, 128)
    chosen = {rows: table.tiles_for(qkv, rows, is_gated=False) for rows in (1, 16, 17, 64, 65)}
    assert chosen == {1: few, 16: few, 17: more, 64: more, 65: None}
    assert [table.max_rows(some, is_gated=False) for some in (qkv, weight(5120, 32768))] == [64, 0]
    assert table.tiles_for(weight(28672, 4096), 100, is_gated=True) == Tiles(128, 64)
    assert table.tiles_for(weight(28672, 4096), 100, is_gated=False) is None
    assert table.tiles_for(weight(6144, 4096, torch.float16), 1, is_gated=False) is None
    assert table.tiles_for(weight(5120, 2880), 1, is_gated=False) == Tiles(64, 64), "2,880 = 45 x 64"
    assert table.tiles_for(weight(576, 576), 1, is_gated=False) is None, "too few inputs for steps of 64"


def test_reference_rounds_where_the_kernel_does() -> None:
    generator = torch.Generator().manual_seed(0)
    x, both = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (3, 10))
    product = skinny_linear_reference(x, both)
    assert torch.equal(product, (x.float() @ both.float().T).bfloat16())
    bias = torch.randn(10, generator=generator).bfloat16()
    assert torch.equal(skinny_linear_reference(x, both, bias), (x.float() @ both.float().T + bias.float()).bfloat16())
    gate, up = product.float().chunk(2, dim=-1)
    assert torch.equal(gated_skinny_linear_reference(x, both), (torch.nn.functional.silu(gate) * up).bfloat16())


def test_early_start_is_only_on_hopper() -> None:
    assert dependent_launch(torch.empty(1)) == {"DEPENDENT": False, "launch_pdl": False}
    assert dependent_launch(weight(1, 1)) == {"DEPENDENT": True, "launch_pdl": True}
