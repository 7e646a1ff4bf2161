"""4-bit integer weights with a scale per group of inputs, arranged for the registers of wgmma.

A tile is 64 or 128 rows x 64 inputs (32, if groups have 32 inputs). Word (warp, lane / 4, lane % 4, step) of 32 bits
has the thread's eight values of 16 inputs: the bits 4 * (lower + 2 * right) of a half have row
16 * warp + 8 * lower + lane / 4 and inputs 16 * step + 8 * right + 2 * (lane % 4) + half.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kernels.moe.weights import MIDDLE

TILE = 64
GROUPS = (128, 64, 32)  # inputs per scale
_WARP_ROWS = 16
_ROWS_AT_ONCE = 2048  # of packing, whose steps have four bytes per value
_FIRST_INTEGER = 128  # bfloat16 from 128 on: the lowest bits are an integer


class Offset(IntEnum):
    """What a group of integers has besides its scale."""

    NONE = 0  # (value - 8) * scale
    ZERO_POINT = 1  # (value - zero point) * scale
    MINIMUM = 2  # value * scale + minimum


@dataclass(frozen=True, slots=True)
class W4Weight:
    """A weight [N, K] of integers with a scale, and maybe an offset, per group.

    Attributes:
        values: [N / rows, K / inputs, rows * inputs / 8], int32, of a tile of rows x inputs.
        scales: [N / rows, K / group, 1 or 2, rows], bfloat16 or float16, where the rows r and r + 8 are neighbors. The
            bits of bfloat16(128 + zero point), or the minima, follow.
        group: Inputs per scale.
        is_gated: Rows alternate by eight between the halves of the weight, gate and up.
        offset: What each group has besides its scale.
    """

    values: Tensor
    scales: Tensor
    group: int
    is_gated: bool
    offset: Offset = Offset.NONE

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.values.shape[0] * self.tile_rows, self.scales.shape[1] * self.group

    @property
    def tile_rows(self) -> int:
        return self.scales.shape[3]

    @property
    def tile_inputs(self) -> int:
        return min(TILE, self.group)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def why_not_packed(shape: tuple[int, int], group: int) -> str:
    """Return why a weight [N, K] cannot be packed, as a clause, or an empty string."""
    rows, inputs = shape
    if group not in GROUPS:
        return f"its groups have {group} inputs, and the kernels know {', '.join(map(str, GROUPS))}"
    if rows % TILE or inputs % max(TILE, group):
        return f"it has {rows} outputs and {inputs} inputs, and the kernels need multiples of {TILE}"
    return ""


def pack_w4(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, minima: Tensor | None = None, *, is_gated: bool
) -> W4Weight:
    """Arrange a weight for the kernels.

    Args:
        values: [N, K], uint8, 0 to 15.
        scales: [N, K / group], bfloat16 or float16.
        zeros: [N, K / group], uint8, 0 to 15; None: 8, or 0 with minima.
        minima: [N, K / group], of the scales' dtype; None: none.
        is_gated: The halves of the rows are gate and up.

    Raises:
        ValueError: See why_not_packed().
    """
    (rows, inputs), groups = values.shape, scales.shape[1]
    group = inputs // groups
    if why := why_not_packed((rows, inputs), group):
        raise ValueError(f"a 4-bit weight: {why}")
    offset, numbers = Offset.NONE, [scales]
    if zeros is not None:
        offset, numbers = Offset.ZERO_POINT, [scales, (zeros.bfloat16() + _FIRST_INTEGER).view(scales.dtype)]
    elif minima is not None:
        offset, numbers = Offset.MINIMUM, [scales, minima]
    if is_gated:
        values, numbers = _alternating(values), [_alternating(each) for each in numbers]
    tile_rows, tile_inputs = 2 * TILE if rows % (2 * TILE) == 0 else TILE, min(TILE, group)
    words = values.new_empty(rows // tile_rows, inputs // tile_inputs, tile_rows * tile_inputs // 8, dtype=torch.int32)
    for part, packed in zip(values.split(_ROWS_AT_ONCE), words.split(_ROWS_AT_ONCE // tile_rows), strict=True):
        packed.copy_(_words_of(part, tile_rows, tile_inputs))
    per_tile = [_of_tiles(each, tile_rows) for each in numbers]
    return W4Weight(words, torch.stack(per_tile, 2).contiguous(), group, is_gated, offset)


def exact_weight(weight: W4Weight) -> Tensor:
    """Return the weight, [N, K], float32, rows as before packing; exact, but for the rounding of sums with minima."""
    rows, _ = weight.shape
    tiles, steps, _ = weight.values.shape
    words = weight.values.view(tiles, steps, -1, 8, 4, weight.tile_inputs // 16, 1, 1, 1)
    shifts = torch.arange(8, device=words.device).view(2, 2, 2)  # half, right, lower
    shifts = shifts // 4 * 16 + shifts // 2 % 2 * 8 + shifts % 2 * 4
    # tile, inputs, warp, lane / 4, lane % 4, step, half, right, lower
    values = ((words >> shifts) & 15).permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(rows, -1, weight.group)
    scales, *others = (_in_rows(part)[..., None] for part in weight.scales.unbind(2))
    if weight.offset is Offset.MINIMUM:
        exact = values * scales.float() + others[0].float()
    elif weight.offset is Offset.ZERO_POINT:
        exact = (values - (others[0].view(torch.bfloat16).float() - _FIRST_INTEGER)) * scales.float()
    else:
        exact = (values - MIDDLE) * scales.float()
    return _stacked(exact.flatten(1)) if weight.is_gated else exact.flatten(1)


def _alternating(rows: Tensor) -> Tensor:
    """Return the rows in the order: eight of the first half, eight of the second half, and so on."""
    return rows.view(2, len(rows) // _WARP_ROWS, 8, -1).transpose(0, 1).reshape(len(rows), -1)


def _stacked(rows: Tensor) -> Tensor:
    """Return the rows in the order before _alternating()."""
    return rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def _of_tiles(columns: Tensor, tile_rows: int) -> Tensor:
    """Return [tiles, groups, tile_rows] of [N, groups], where the rows r and r + 8 are neighbors."""
    pairs = columns.view(-1, 2, 8, columns.shape[1]).transpose(1, 2).reshape(columns.shape)
    return pairs.view(-1, tile_rows, columns.shape[1]).transpose(1, 2)


def _in_rows(pairs: Tensor) -> Tensor:
    """Return [N, groups] of [tiles, groups, tile_rows], whose rows r and r + 8 are neighbors."""
    groups = pairs.shape[1]
    rows = pairs.transpose(1, 2).reshape(-1, 8, 2, groups).transpose(1, 2)
    return rows.reshape(-1, groups).contiguous()


def _words_of(values: Tensor, tile_rows: int, tile_inputs: int) -> Tensor:
    """Return [tiles, steps, words] of the values [rows, K] of some tiles."""
    rows, inputs = values.shape
    tiles, steps = rows // tile_rows, inputs // tile_inputs
    # tile, warp, lower, lane / 4, inputs, step, right, lane % 4, half
    parts = values.view(tiles, tile_rows // _WARP_ROWS, 2, 8, steps, tile_inputs // 16, 2, 4, 2)
    parts = parts.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(tiles, steps, -1, 8).int()
    shifts = torch.arange(8, device=values.device)
    return (parts << (shifts // 4 * 16 + shifts // 2 % 2 * 8 + shifts % 2 * 4)).sum(-1, dtype=torch.int32)
