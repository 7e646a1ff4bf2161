"""The Triton kernel of token_bitmask.py: one program per block of a row."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # tokens per program: 8 per thread for 4 warps, 16 bytes of bf16


# `rows` may follow the masks at any multiple of 4 bytes; alignment must not create a variant.
@triton.jit(do_not_specialize_on_alignment=["rows"])
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
