"""Forbid tokens by bit masks: grammar constraints for some rows of a batch."""

import numpy as np
import torch
from torch import Tensor


def apply_token_bitmask_reference(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Mask on a CPU by bits; masked_fill_ branches per element (5.5 instead of 0.4 ms for 32 rows of 49152)."""
    allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
    bits = torch.int16 if scores.element_size() == 2 else torch.int32
    minus_infinity = torch.full((), -torch.inf, dtype=scores.dtype).view(bits)
    for row, allowed_in_row in zip(rows.tolist(), torch.from_numpy(allowed), strict=True):
        kept = allowed_in_row.to(bits).neg_()  # all ones or all zeros
        scores[row].view(bits).bitwise_and_(kept).bitwise_or_(kept.bitwise_not_().bitwise_and_(minus_infinity))


def apply_token_bitmask(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the scores of forbidden tokens to -inf, in place.

    Args:
        scores: [N, V], float32, bfloat16 or float16; rows may be strided, columns are contiguous.
        rows: [R], int32, distinct rows of `scores`.
        masks: [R, W], int32, contiguous, W = ceil(V / 32); bit t % 32 of word t // 32 allows token t.
    """
    if not scores.is_cuda:
        apply_token_bitmask_reference(scores, rows, masks)
        return
    from kernels.token_bitmask_triton import apply_token_bitmask_triton  # noqa: PLC0415 - imports triton

    apply_token_bitmask_triton(scores, rows, masks)
