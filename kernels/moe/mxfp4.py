"""MXFP4 weights of experts: e2m1 values with an e8m0 scale per 32 inputs, arranged for the registers of wgmma.

A tile is 64 rows x 64 inputs: 512 words of 32 bits, four per thread of four warps. Word (warp, lane / 4, lane % 4,
step) has the thread's eight values of 16 inputs. Its halves are the even and odd inputs; PLACES are the bits in a half
of value (lower, right): row 16 * warp + 8 * lower + lane / 4 and inputs 16 * step + 8 * right + 2 * (lane % 4) + half.
A scale word (warp, lane / 4) has bytes (group, lower). A byte is the exponent of the scale plus 193: in the bits of a
bfloat16's exponent it multiplies the three bits of a value, read as a subnormal or normal bfloat16, to the value times
its scale times 2^-60.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
GROUP = 32
OUTPUT_SCALE = 2.0**60
# (sign, lowest bit of the magnitude) of the values (lower, right) 00, 10, 01, 11.
PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_OFFSET = 66  # of a stored byte from the e8m0 byte, which is the exponent plus 127
_MIN_SCALE, _MAX_SCALE = 62, 188


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Weights [E, N, K] in tiles.

    Attributes:
        values: [E, N / 64, K / 64, 512], int32. Gated: [E, N / 128, K / 64, 1024], a tile of gate before one of up.
        scales: [E, N / 64, K / 64, 32], int32. Gated: [E, N / 128, K / 64, 64].
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        experts, tiles, steps, words = self.values.shape
        return experts, tiles * (words // 512) * TILE, steps * TILE

    def exact_weight(self) -> Tensor:
        """Return the exact weight, [E, N, K], bfloat16."""
        experts, rows, inputs = self.shape
        tiles, steps = rows // TILE, inputs // TILE
        words = _without_boxes(self.values, 512).view(experts, tiles, steps, 4, 8, 4, 4, 1, 1)
        halves = torch.arange(2, device=words.device).view(1, 2) * 16
        signs, lows = (torch.tensor(place, device=words.device).view(4, 1) for place in zip(*PLACES, strict=True))
        magnitudes = (words >> (lows + halves)) & 7
        values = torch.tensor(_E2M1, device=words.device)[magnitudes.long()]
        values = torch.where((words >> (signs + halves)) & 1 == 1, -values, values)
        # expert, tile, inputs, warp, lane / 4, lane % 4, step, right, lower, half
        values = values.view(experts, tiles, steps, 4, 8, 4, 4, 2, 2, 2).permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)
        scale_words = _without_boxes(self.scales, 32).view(experts, tiles, steps, 4, 8, 1)
        bytes_ = (scale_words >> (torch.arange(4, device=words.device) * 8)) & 255
        # expert, tile, warp, lower, lane / 4, inputs, group
        bytes_ = bytes_.view(experts, tiles, steps, 4, 8, 2, 2).permute(0, 1, 3, 6, 4, 2, 5)
        powers = torch.exp2(bytes_.reshape(experts, rows, -1).float() - 127 - _SCALE_OFFSET)
        return (values.reshape(experts, rows, -1) * powers.repeat_interleave(GROUP, 2)).bfloat16()


def pack_mxfp4(blocks: Tensor, scales: Tensor, is_gated: bool) -> Mxfp4Experts:
    """Arrange the MXFP4 tensors of a checkpoint for the kernels.

    Args:
        blocks: [E, N, K / 32, 16], uint8; the low bits of a byte are the first of two inputs.
        scales: [E, N, K / 32], uint8, e8m0. Groups with a scale below 2^-65 become 0.
        is_gated: The first half of the rows is the gate, the second half up.

    Returns:
        The same values in as many bytes.

    Raises:
        ValueError: If a size is not a multiple of the tile, or a scale is above 2^61.
    """
    experts, rows, groups, _ = blocks.shape
    row_unit = 2 * TILE if is_gated else TILE
    if rows % row_unit or groups % 2:
        raise ValueError(
            f"MXFP4 experts of {rows} outputs and {groups * GROUP} inputs: use multiples of {row_unit} and {TILE}"
        )
    if int(scales.max()) > _MAX_SCALE:
        raise ValueError(f"MXFP4 scale 2^{int(scales.max()) - 127}: the largest supported one is 2^{_MAX_SCALE - 127}")
    tiles, steps = rows // TILE, groups // 2
    boxes = row_unit // TILE
    values = blocks.new_empty(experts, tiles // boxes, steps, boxes * 512, dtype=torch.int32)
    packed_scales = blocks.new_empty(experts, tiles // boxes, steps, boxes * 32, dtype=torch.int32)
    for expert in range(experts):  # one at a time: the intermediate tensors have four bytes per value
        is_zero = scales[expert, :, :, None] < _MIN_SCALE
        words = _words_of(blocks[expert].masked_fill(is_zero, 0), tiles, steps)
        values[expert] = _with_boxes(words, boxes)
        bytes_ = scales[expert].clamp(min=_MIN_SCALE).int() + _SCALE_OFFSET
        bytes_ = bytes_.view(tiles, 4, 2, 8, steps, 2).permute(0, 4, 1, 3, 5, 2).reshape(tiles, steps, 32, 4)
        packed_scales[expert] = _with_boxes(_joined(bytes_ << (torch.arange(4, device=bytes_.device) * 8)), boxes)
    return Mxfp4Experts(values, packed_scales)


def _words_of(blocks: Tensor, tiles: int, steps: int) -> Tensor:
    """Return [tiles, steps, 512] of blocks [N, K / 32, 16]."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).int()
    # tile, warp, lower, lane / 4, inputs, step, right, lane % 4, half
    halves = halves.view(tiles, 4, 2, 8, steps, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    halves = halves.reshape(tiles, steps, 512, 4, 2)
    shifts = torch.arange(2, device=blocks.device).view(1, 2) * 16
    signs, lows = (torch.tensor(place, device=blocks.device).view(4, 1) for place in zip(*PLACES, strict=True))
    bits = ((halves >> 3) << (signs + shifts)) | ((halves & 7) << (lows + shifts))
    return _joined(bits.flatten(-2))


def _joined(bits: Tensor) -> Tensor:
    """Return the bitwise or over the last dimension, whose elements have no bit in common."""
    return bits.sum(-1, dtype=torch.int32)


def _with_boxes(tiled: Tensor, boxes: int) -> Tensor:
    """Return [tiles / boxes, steps, boxes * words] of [tiles, steps, words], where all gate tiles come first."""
    tiles, steps, words = tiled.shape
    return tiled.view(boxes, tiles // boxes, steps, words).permute(1, 2, 0, 3).reshape(tiles // boxes, steps, -1)


def _without_boxes(stored: Tensor, words: int) -> Tensor:
    """Return [E, tiles, steps, words] of stored [E, tiles / boxes, steps, boxes * words]."""
    experts, tiles, steps, _ = stored.shape
    return stored.view(experts, tiles, steps, -1, words).permute(0, 3, 1, 2, 4).reshape(experts, -1, steps, words)
