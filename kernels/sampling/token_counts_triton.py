"""The Triton kernels of token_counts.py, where the contract is.

A program counts a whole row in recount(): outputs first, by atomic additions to words of two counts, then the marks of
the prompt. An addition that passes MAX_COUNT is taken back. At most LANES of them are on their way at once, so a count
never carries into its neighbor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.token_counts_reference import MAX_COUNT

_MAX_COUNT = tl.constexpr(MAX_COUNT)
_LANES, _RECOUNT_WARPS = 1024, 8
_DRAWN_BLOCK = 128
_BLOCK = 2048  # tokens of one program: 16 for each thread of 4 warps
_ROWS = ["rows", "score_rows", "penalties", "spans", "token_ids"]  # parts of one tensor, at any multiple of 4 bytes


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _recount_kernel(words, rows, token_ids, spans, words_per_row, LANES: tl.constexpr):
    place = tl.program_id(0)
    row = words + tl.load(rows + place).to(tl.int64) * words_per_row
    lanes = tl.arange(0, LANES)
    for first in range(0, words_per_row, LANES):
        tl.store(row + first + lanes, tl.zeros([LANES], tl.int32), mask=first + lanes < words_per_row)
    tl.debug_barrier()  # additions come after the zeros of all threads
    output_end = tl.load(spans + place * 4 + 3)
    for first in range(tl.load(spans + place * 4 + 2), output_end, LANES):
        inside = first + lanes < output_end
        token = tl.load(token_ids + first + lanes, mask=inside, other=0)
        shift = (token % 2) * 16
        one = tl.full([LANES], 1, tl.int32) << shift
        before = tl.atomic_add(row + token // 2, one, mask=inside)
        is_full = inside & (((before >> shift) & 0xFFFF) >= _MAX_COUNT)
        tl.atomic_add(row + token // 2, -one, mask=is_full)
        tl.debug_barrier()  # bounds the additions on their way
    prompt_end = tl.load(spans + place * 4 + 1)
    for first in range(tl.load(spans + place * 4), prompt_end, LANES):
        inside = first + lanes < prompt_end
        token = tl.load(token_ids + first + lanes, mask=inside, other=0)
        tl.atomic_or(row + token // 2, tl.full([LANES], 0x8000, tl.int32) << ((token % 2) * 16), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_ROWS)
def _count_drawn_kernel(counts, rows, score_rows, token_ids, num_rows, row_stride, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_rows
    row = tl.load(rows + places, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ids + tl.load(score_rows + places, mask=inside, other=0), mask=inside, other=0)
    count = tl.load(counts + row * row_stride + token, mask=inside, other=0)
    more = count + ((count & _MAX_COUNT) < _MAX_COUNT).to(tl.int16)
    tl.store(counts + row * row_stride + token, more, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _apply_penalties_kernel(
    scores, score_rows, counts, rows, penalties, counts_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_of_counts = counts + tl.load(rows + place).to(tl.int64) * counts_stride
    count = tl.load(row_of_counts + columns, mask=columns < VOCAB, other=0).to(tl.int32)
    occurs = count != 0
    row_of_scores = scores + tl.load(score_rows + place).to(tl.int64) * VOCAB
    value = tl.load(row_of_scores + columns, mask=occurs, other=0.0)
    repetition = tl.load(penalties + place * 3)
    frequency = tl.load(penalties + place * 3 + 1)
    presence = tl.load(penalties + place * 3 + 2)
    drawn = count & _MAX_COUNT
    value = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
    value = value - frequency * drawn.to(tl.float32) - tl.where(drawn > 0, presence, 0.0)
    tl.store(row_of_scores + columns, value, mask=occurs)


def recount_triton(counts: Tensor, rows: Tensor, token_ids: Tensor, spans: Tensor) -> None:
    assert counts.is_contiguous() and counts.shape[1] % 8 == 0 and spans.is_contiguous()
    words = counts.view(-1).view(dtype=torch.int32)
    _recount_kernel[(len(rows),)](
        words, rows, token_ids, spans, counts.shape[1] // 2, LANES=_LANES, num_warps=_RECOUNT_WARPS
    )


def count_drawn_triton(counts: Tensor, rows: Tensor, score_rows: Tensor, token_ids: Tensor) -> None:
    grid = (triton.cdiv(len(rows), _DRAWN_BLOCK),)
    _count_drawn_kernel[grid](
        counts, rows, score_rows, token_ids, len(rows), counts.stride(0), BLOCK=_DRAWN_BLOCK, num_warps=4
    )


def apply_penalties_triton(scores: Tensor, score_rows: Tensor, counts: Tensor, rows: Tensor, penalties: Tensor) -> None:
    vocab_size = scores.shape[1]
    assert scores.is_contiguous() and penalties.is_contiguous() and counts.shape[1] >= vocab_size
    _apply_penalties_kernel[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        scores, score_rows, counts, rows, penalties, counts.stride(0),
        VOCAB=vocab_size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,  # as the reference rounds
    )  # fmt: skip
