"""Select the tiles of skinny_linear from the shape of a weight: by rule, with measured overrides.

The rule was fitted to 59 layers of ten models, whole and halved, at 1, 16, 64 and 128 rows against cuBLAS, each in a
graph of layers larger than the L2 cache (bench/results/h200/linear_tiles.jsonl in commit 78dad4b). On average it is
within 1 % of the best tiles tried. Nothing is tuned while serving.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kernels.skinny_linear import MAX_ROWS, NUM_SMS, Tiles

Shape = tuple[int, int, bool]  # outputs (gated: of gate and up each), inputs, is gated

# Overrides of the rule, ascending: maximum number of rows -> tiles; no tiles above. With the rule, each shape would be
# 2
# to 8 % slower than cuBLAS at some number of rows.
MEASURED: dict[Shape, tuple[tuple[int, Tiles], ...]] = {
    (49152, 4096, False): ((64, Tiles(64, 128)),),
    (2048, 8192, False): ((16, Tiles(64, 256)),),
    (2560, 9728, False): ((16, Tiles(64, 256)),),
    (5120, 25600, False): ((8, Tiles(128, 128)),),
    (5120, 32768, False): (),
}

_HEAD_OUTPUTS = 32_768  # layers with more are output heads; they have enough tiles to balance wide ones
_NARROW_INPUTS = 2_048  # with so many inputs, a multiple of 64 alone is cut in steps of 64; gpt-oss has 2,880
_FEW_TILES = 64  # of 64 outputs; half of the SMs have one each
_LITTLE_WASTE = 0.7  # busy share of the SMs, when the tiles are not a multiple of the SMs


def tiles_for(weight: Tensor, num_rows: int, is_gated: bool) -> Tiles | None:
    """Return the tiles for a weight on its device; None: use the library's kernel."""
    if weight.dtype != torch.bfloat16 or not is_known(weight.device):
        return None
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    return tiles_of((num_outputs, weight.shape[1], is_gated), num_rows)


def tiles_of(shape: Shape, num_rows: int) -> Tiles | None:
    """Return the tiles for a shape on a GPU that the rule was fitted to."""
    if num_rows > MAX_ROWS:
        return None
    if shape in MEASURED:
        return next((tiles for max_rows, tiles in MEASURED[shape] if num_rows <= max_rows), None)
    num_outputs, num_inputs, is_gated = shape
    tiles = _gated(num_outputs, num_rows) if is_gated else _plain(num_outputs, num_inputs, num_rows)
    if tiles is None:
        return None
    if num_inputs % tiles.block_k and num_inputs >= _NARROW_INPUTS:
        tiles = replace(tiles, block_k=64)
    fits = num_outputs % (tiles.block_n // 2 if is_gated else tiles.block_n) == 0 and num_inputs % tiles.block_k == 0
    return tiles if fits else None


def _gated(num_outputs: int, num_rows: int) -> Tiles | None:
    num_tiles = num_outputs // 64
    if num_rows <= 16 or (num_rows <= 64 and (num_tiles <= 2 * NUM_SMS or _busy(num_tiles) >= _LITTLE_WASTE + 0.02)):
        return Tiles(128, 128)
    return Tiles(128, 64) if num_rows > 64 and _busy(num_tiles) >= _LITTLE_WASTE + 0.1 else None


def _plain(num_outputs: int, num_inputs: int, num_rows: int) -> Tiles | None:
    num_tiles = num_outputs // 64
    if num_outputs >= _HEAD_OUTPUTS:
        return Tiles(128, 128) if num_rows <= 64 else None
    if num_rows <= 16:
        # With 80 tiles (5,120 outputs), half as many tiles beat 80 programs on 132 SMs by 3 to 10 % for long rows.
        is_uneven = _FEW_TILES < num_tiles < NUM_SMS and _busy(num_tiles) < _LITTLE_WASTE and num_inputs > 4_096
        return Tiles(128, 128) if is_uneven else Tiles(64, 256 if num_inputs % 256 == 0 else 128)
    if num_rows <= 64:
        return Tiles(64, 128) if num_tiles <= _FEW_TILES or _busy(num_tiles) >= _LITTLE_WASTE else None
    # Two programs share a tile with half of the rows each: x is read again per tile, which is expensive for long rows.
    return Tiles(64, 128, row_blocks=2) if num_tiles <= _FEW_TILES and num_inputs <= 10_240 else None


def _busy(num_tiles: int) -> float:
    """Return the share of time in which an SM has a tile, if all start at once."""
    rounds = max(-(-num_tiles // NUM_SMS), 1)
    return num_tiles / (rounds * NUM_SMS)


def max_rows(weight: Tensor, is_gated: bool) -> int:
    """Return the largest number of rows for which there are tiles; 0: only the library's kernel works."""
    for num_rows in range(MAX_ROWS, 0, -1):
        if tiles_for(weight, num_rows, is_gated) is not None:
            return num_rows
    return 0


@cache
def is_known(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU with the number of SMs that the rule was fitted to."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, NUM_SMS)
