"""The rules of fp8_linear that need no GPU: supported shapes and their tiles."""

from itertools import pairwise

import pytest
import torch

from bench.kernel.linear_shapes import all_shapes
from kernels.fp8_linear import MAX_ROWS
from kernels.fp8_tiles import fp8_tiles, max_fp8_rows
from kernels.scaled import GROUP, quantize_groups_reference, quantize_rows_reference

ROWS = range(1, MAX_ROWS + 1)
SHAPES = [*all_shapes(), (1280, 640, False), (1536, 576, True), (100, 4096, False), (64, 128, False)]


@pytest.mark.parametrize("is_grouped", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_tiles_cover_a_matrix_exactly(shape: tuple[int, int, bool], is_grouped: bool) -> None:
    num_outputs, num_inputs, is_gated = shape
    chosen = [fp8_tiles(shape, num_rows, is_grouped) for num_rows in ROWS]
    most = max_fp8_rows(shape, is_grouped)
    assert [tiles is not None for tiles in chosen] == [num_rows <= most for num_rows in ROWS]
    for tiles in filter(None, chosen):
        box = tiles.block_n // 2 if is_gated else tiles.block_n
        assert box == 64, "rows of a wgmma, within one block of scales"
        assert num_outputs % box == 0 and tiles.block_k % GROUP == 0
        assert num_inputs % (tiles.halves * tiles.block_k) == 0
    changes = {rows for rows, (one, next_one) in enumerate(pairwise(chosen), start=1) if one != next_one}
    alike = {tiles.halves for tiles in chosen[: max_fp8_rows(shape, is_grouped, is_one_order=True)] if tiles}
    assert len(alike) <= 1, "sums of K have one order"
    assert changes <= {32, 64, 128}, "else a decoding batch that grows by one would be compiled for again and again"


def test_sizes_without_a_tile_use_the_library() -> None:
    assert max_fp8_rows((1536, 576, True), False) == 0, "inputs are read 128 at a time"
    assert max_fp8_rows((100, 4096, False), False) == 0
    assert [max_fp8_rows((64, 128, False), is_grouped) for is_grouped in (False, True)] == [MAX_ROWS, 0]


def test_power_of_two_scales_quantize_exactly() -> None:
    x = torch.tensor([[448.0, -3.5, 0.0, 2.0] * 64, [896.0, 64.0, -0.25, 0.0] * 64])
    assert torch.equal(quantize_rows_reference(x).exact_rows(), x)
    x[1, :128] /= 256
    grouped = quantize_groups_reference(x)
    assert torch.equal(grouped.exact_rows(), x)
    assert grouped.scales.tolist() == [[1.0, 2 / 256], [1.0, 2.0]]
    assert torch.equal(grouped.part(1, 2).exact_rows(), x[1:])
