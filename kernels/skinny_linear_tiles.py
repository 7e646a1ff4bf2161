"""Which products go to skinny_linear, and with which tiles: measured, checked in, chosen by device and shape alone.

    tiles_for(weight, num_rows, is_gated) -> Tiles, or None: the library's product is faster or the only one

The rows are those for which the kernel won against cuBLAS in a graph of eight layers (bench/kernel/linear.py,
bench/results/h200/linear.json). Nothing is tuned while serving.

It is asked at a worker's start, for each weight. It knows shapes, and no weights.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.skinny_linear import NUM_SMS, Tiles

# (outputs, inputs, is gated): (rows up to, tiles), ascending. Of 4,096 columns and 14,336 inner ones; two heads.
H200_TILES: dict[tuple[int, int, bool], tuple[tuple[int, Tiles], ...]] = {
    (6144, 4096, False): ((16, Tiles(64, 256)), (64, Tiles(64, 128))),
    (4096, 4096, False): ((16, Tiles(64, 256)), (64, Tiles(64, 128)), (128, Tiles(64, 128, row_blocks=2))),
    (14336, 4096, True): ((64, Tiles(128, 128)), (128, Tiles(128, 64))),
    (4096, 14336, False): ((16, Tiles(64, 256)), (64, Tiles(64, 128))),
    (49152, 4096, False): ((64, Tiles(64, 128)),),
    (128256, 4096, False): ((64, Tiles(64, 128)),),
}


def tiles_for(weight: Tensor, num_rows: int, is_gated: bool) -> Tiles | None:
    if weight.dtype != torch.bfloat16 or not _is_known(weight.device):
        return None
    num_outputs = len(weight) // 2 if is_gated else len(weight)
    for max_rows, tiles in H200_TILES.get((num_outputs, weight.shape[1], is_gated), ()):
        if num_rows <= max_rows:
            return tiles
    return None


@cache
def _is_known(device: torch.device) -> bool:
    """A Hopper GPU with the SMs that the table was made for."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, NUM_SMS)
