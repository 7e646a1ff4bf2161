"""Which products of 8-bit floats go to fp8_linear, and with which tiles: by rule from the shape.

    fp8_tiles(shape, num_rows, is_grouped) -> Fp8Tiles, or None: the library's product is faster or the only one
    most_fp8_rows(shape, is_grouped)          up to how many rows there are tiles

The rule was fitted to the products of two 8B models, whole and halved, at 1 to 256 rows, each in a graph of weights
that exceed the L2 cache (bench/results/h200/fp8_linear.jsonl). Nothing is tuned while serving. It knows shapes, no
weights. It is used in each step, for each weight, where nothing is captured.
"""

from kernels.fp8_linear import MAX_ROWS, Fp8Tiles
from kernels.scaled import GROUP
from kernels.skinny_linear_tiles import Shape

_FEW_TILES = 64  # of 64 outputs: half of the SMs have one each
_MANY_OUTPUTS = 8192
_LONG = 8192  # inputs from which on an exchange of 2 us is shorter than what half of the SMs need more
_MOST_ROWS_OF_ONE_ORDER = 64  # up to which a product's sums have one order


def fp8_tiles(shape: Shape, num_rows: int, is_grouped: bool) -> Fp8Tiles | None:
    num_outputs, num_inputs, is_gated = shape
    if num_rows > most_fp8_rows(shape, is_grouped):
        return None
    has_few_tiles = num_outputs // 64 <= _FEW_TILES
    if is_gated:
        return Fp8Tiles(128, _deepest(num_inputs, 256))
    if num_rows > 64:
        return Fp8Tiles(64, _deepest(num_inputs, 256), row_blocks=2 if has_few_tiles else 1)
    if has_few_tiles and num_inputs >= _LONG and num_inputs % 512 == 0:
        return Fp8Tiles(64, 256, halves=2)
    return Fp8Tiles(64, _deepest(num_inputs, 512 if num_rows <= 32 else 256))


def most_fp8_rows(shape: Shape, is_grouped: bool, is_one_order: bool = False) -> int:
    """The largest number of rows for which there are tiles; 0: the library's product is the only one.

    `is_one_order`: for which rows have the same bits whatever the number is.
    """
    num_outputs, num_inputs, is_gated = shape
    if num_inputs % GROUP or num_outputs % (GROUP if is_grouped else 64):
        return 0
    # Many outputs are the library's above 64 rows, and so are gated ones: 36 us against 49 at 128 rows.
    if is_one_order or is_gated or num_outputs > _MANY_OUTPUTS:
        return _MOST_ROWS_OF_ONE_ORDER
    return MAX_ROWS if num_outputs // 64 <= _FEW_TILES else 128


def _deepest(num_inputs: int, most: int) -> int:
    """Elements of K a step: more are fewer and longer waits."""
    return next(block for block in (most, 256, 128) if block <= most and num_inputs % block == 0)
