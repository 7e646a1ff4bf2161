"""Which products of 8-bit floats go to fp8_linear, and with which tiles: by rule from the shape.

    fp8_tiles(shape, num_rows, is_grouped) -> Tiles, or None: the library's product is faster or the only one
    most_fp8_rows(shape, is_grouped)          up to how many rows there are tiles

The rule was fitted to the products of two 8B models at 1, 16, 32, 64 and 128 rows, each in a graph of weights that
exceed the L2 cache (bench/results/h200/fp8_linear.jsonl). Nothing is tuned while serving. It knows shapes, no weights.
"""

from kernels.scaled import GROUP
from kernels.skinny_linear import MAX_ROWS, Tiles
from kernels.skinny_linear_tiles import Shape

_FEW_TILES = 64  # of 64 outputs: half of the SMs have one each
# More of them are the library's above 64 rows, and so are gated ones: 36 us against 49 at 128 rows.
_MANY_OUTPUTS = 8192


def fp8_tiles(shape: Shape, num_rows: int, is_grouped: bool) -> Tiles | None:
    num_outputs, num_inputs, is_gated = shape
    if num_rows > most_fp8_rows(shape, is_grouped):
        return None
    if is_gated:
        # Scales of groups take the registers that two sums more would need.
        return Tiles(128, _deepest(num_inputs, 256 if num_rows > 32 and not is_grouped else 128))
    if num_rows <= 32:
        return Tiles(64, _deepest(num_inputs, 512))
    is_shared = num_rows > 64 and num_outputs // 64 <= _FEW_TILES
    return Tiles(64, _deepest(num_inputs, 256), row_blocks=2 if is_shared else 1)


def most_fp8_rows(shape: Shape, is_grouped: bool) -> int:
    """The largest number of rows for which there are tiles; 0: the library's product is the only one."""
    num_outputs, num_inputs, is_gated = shape
    if num_inputs % GROUP or num_outputs % (GROUP if is_grouped else 64):
        return 0
    return 64 if is_gated or num_outputs > _MANY_OUTPUTS else MAX_ROWS


def _deepest(num_inputs: int, most: int) -> int:
    """Elements of K a step: more are fewer and longer waits."""
    return next(block for block in (most, 256, 128) if block <= most and num_inputs % block == 0)
