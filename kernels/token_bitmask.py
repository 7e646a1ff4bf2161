"""Forbids tokens by bit masks: what grammars leave of the vocabulary, in some rows of a batch.

apply_token_bitmask(scores, rows, masks)

scores [N, V] float32, bfloat16 or float16; rows may be strided, columns are contiguous. Modified in place.
rows [R] int32, each a row of `scores`, none twice
masks [R, W] int32, contiguous, W = ceil(V / 32): bit t % 32 of word t // 32 says whether token t is allowed in the
    row; the score of one that is not becomes -inf

It is used in a step, between the forward pass and the sampler. It knows no grammar.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # tokens of one program: 8 for each thread of 4 warps, 16 bytes of bf16


def apply_token_bitmask_reference(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Mask tensors on a CPU, by bits: masked_fill_ branches at every element (5.5 ms for 32 rows of 49152, not 0.4)."""
    allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
    bits = torch.int16 if scores.element_size() == 2 else torch.int32
    minus_infinity = torch.full((), -torch.inf, dtype=scores.dtype).view(bits)
    for row, allowed_in_row in zip(rows.tolist(), torch.from_numpy(allowed), strict=True):
        kept = allowed_in_row.to(bits).neg_()  # all bits or none
        scores[row].view(bits).bitwise_and_(kept).bitwise_or_(kept.bitwise_not_().bitwise_and_(minus_infinity))


@triton.jit
def _token_bitmask_kernel(scores, rows, masks, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    mask_of_row = masks + tl.program_id(0).to(tl.int64) * ((VOCAB + 31) // 32)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(mask_of_row + columns // 32, mask=columns < VOCAB, other=-1)
    is_forbidden = ((words >> (columns % 32)) & 1) == 0
    tl.store(scores + row * row_stride + columns, float("-inf"), mask=is_forbidden & (columns < VOCAB))


def apply_token_bitmask_triton(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    vocab_size = scores.shape[1]
    assert scores.stride(1) == 1 and masks.is_contiguous() and masks.shape[1] == triton.cdiv(vocab_size, 32)
    grid = (masks.shape[0], triton.cdiv(vocab_size, _BLOCK))
    _token_bitmask_kernel[grid](scores, rows, masks, scores.stride(0), VOCAB=vocab_size, BLOCK=_BLOCK, num_warps=4)


def apply_token_bitmask(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    if scores.is_cuda:
        apply_token_bitmask_triton(scores, rows, masks)
    else:
        apply_token_bitmask_reference(scores, rows, masks)
