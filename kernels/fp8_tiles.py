"""Select the tiles of fp8_linear from the shape of a weight, by a fixed rule.

The rule was fitted to the linear layers of two 8B models, whole and halved, at 1 to 256 rows, each in a graph of
weights larger than the L2 cache (bench/results/h200/fp8_linear.jsonl in commit 78dad4b). Nothing is tuned
while serving.
"""

from kernels.fp8_linear import MAX_ROWS, Fp8Tiles
from kernels.scaled import GROUP
from kernels.skinny_linear_tiles import Shape

_FEW_TILES = 64  # of 64 outputs; half of the SMs have one each
_MANY_OUTPUTS = 8192
_LONG = 8192  # inputs from which a 2 us exchange costs less than the work of the idle SMs
_MAX_ROWS_OF_ONE_ORDER = 64  # up to this number of rows, the order of a layer's sums does not change


def fp8_tiles(shape: Shape, num_rows: int, is_grouped: bool) -> Fp8Tiles | None:
    """Return the tiles for this number of rows; None: use the library's kernel."""
    num_outputs, num_inputs, is_gated = shape
    if num_rows > max_fp8_rows(shape, is_grouped):
        return None
    has_few_tiles = num_outputs // 64 <= _FEW_TILES
    if is_gated:
        return Fp8Tiles(128, _deepest(num_inputs, 256))
    if num_rows > 64:
        return Fp8Tiles(64, _deepest(num_inputs, 256), row_blocks=2 if has_few_tiles else 1)
    if has_few_tiles and num_inputs >= _LONG and num_inputs % 512 == 0:
        return Fp8Tiles(64, 256, halves=2)
    return Fp8Tiles(64, _deepest(num_inputs, 512 if num_rows <= 32 else 256))


def max_fp8_rows(shape: Shape, is_grouped: bool, is_one_order: bool = False) -> int:
    """Return the largest number of rows for which there are tiles; 0: only the library's kernel works.

    With `is_one_order`, limit it to row counts for which a row has the same bits.
    """
    num_outputs, num_inputs, is_gated = shape
    if num_inputs % GROUP or num_outputs % (GROUP if is_grouped else 64):
        return 0
    # Many outputs, and gated layers, are left to the library above 64 rows: 36 us against 49 us at 128 rows.
    if is_one_order or is_gated or num_outputs > _MANY_OUTPUTS:
        return _MAX_ROWS_OF_ONE_ORDER
    return MAX_ROWS if num_outputs // 64 <= _FEW_TILES else 128


def _deepest(num_inputs: int, max_block: int) -> int:
    """Return the elements of K per step; larger steps mean fewer and longer waits."""
    return next(block for block in (max_block, 256, 128) if block <= max_block and num_inputs % block == 0)
