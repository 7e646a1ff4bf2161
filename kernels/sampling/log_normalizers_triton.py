"""The Triton kernel of log_normalizers.py, where the contract is: one program a row reads it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _WARPS = 4096, 8
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _log_normalizer_kernel(scores, best_scores, log_sums, row_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    best = tl.full([TILE], -_INFINITY, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        inside = start + columns < VOCAB
        values = tl.load(scores + row * row_stride + start + columns, mask=inside, other=-_INFINITY).to(tl.float32)
        greater = tl.maximum(best, values)
        base = tl.where(greater == -_INFINITY, 0.0, greater)  # nothing but -inf so far
        mass = mass * tl.exp(best - base) + tl.exp(values - base)
        best = greater
    greatest = tl.max(best, axis=0)
    base = tl.where(greatest == -_INFINITY, 0.0, greatest)
    tl.store(best_scores + row, greatest)
    tl.store(log_sums + row, tl.log(tl.sum(mass * tl.exp(best - base), axis=0)))


def log_normalizers_triton(scores: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = scores.shape
    assert scores.stride(1) == 1
    best = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    log_sums = torch.empty_like(best)
    _log_normalizer_kernel[(num_rows,)](
        scores, best, log_sums, scores.stride(0), VOCAB=vocab_size, TILE=_TILE, num_warps=_WARPS
    )
    return best, log_sums
