"""ngram_drafts.py on CUDA."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.draft_inputs_reference import MAX_DRAFTS, LastDrafts, SampledStep
from kernels.ngram_drafts_reference import NgramLengths, TokenTable

_SAMPLES = MAX_DRAFTS + 1


@triton.jit(do_not_specialize=["max_len"])
def _record_tokens_kernel(
    token_ids, positions, logits_indices, first_samples, last_samples, next_token_ids, kept_rows, kept_positions,
    table, table_rows, max_len, table_stride, SAMPLES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    kept = tl.load(kept_positions + index)
    tokens = table + tl.load(table_rows + index).to(tl.int64) * table_stride
    samples = tl.load(first_samples + index) + tl.arange(0, SAMPLES)
    inside = (kept >= 0) & (samples <= tl.load(last_samples + index))
    row = tl.load(logits_indices + samples, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    tl.store(tokens + position, tl.load(token_ids + row).to(tl.int32), mask=inside & (position <= kept))
    after = tl.load(next_token_ids + tl.load(kept_rows + index))
    tl.store(tokens + kept + 1, after.to(tl.int32), mask=(kept >= 0) & (kept + 1 < max_len))


def record_tokens_triton(step: SampledStep, last: LastDrafts, table: TokenTable) -> None:
    _record_tokens_kernel[(len(table.rows),)](
        step.token_ids,
        step.positions,
        step.logits_indices,
        step.first_samples,
        step.last_samples,
        last.next_token_ids,
        last.kept_rows,
        last.kept_positions,
        table.token_ids,
        table.rows,
        table.token_ids.shape[1],
        table.token_ids.stride(0),
        SAMPLES=_SAMPLES,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["max_len", "least", "most"])
def _ngram_drafts_kernel(
    table, table_rows, kept_positions, drafts, max_len, least, most, table_stride, draft_stride,
    NUM_DRAFTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    tokens = table + tl.load(table_rows + index).to(tl.int64) * table_stride
    length = tl.minimum(tl.load(kept_positions + index) + 2, max_len)
    if length > 1:
        lanes = tl.arange(0, LANES)
        best = tl.zeros((LANES,), tl.int64)  # the match's length, whether all drafts follow it, and its end
        for first in range(1, length, LANES):
            end = first + lanes
            matched = tl.zeros((LANES,), tl.int64)
            is_equal = end < length
            for back in range(1, most + 1):
                wanted = tl.load(tokens + length - back, mask=back <= length, other=-1)
                is_equal = is_equal & (end >= back)
                is_equal = is_equal & (tl.load(tokens + end - back, mask=is_equal, other=-2) == wanted)
                matched += is_equal.to(tl.int64)
            is_followed = (end + NUM_DRAFTS <= length).to(tl.int64)
            best = tl.maximum(best, (matched << 33) | (is_followed << 32) | end)
        found = tl.max(best, 0)
        end = (found & 0xFFFFFFFF).to(tl.int32)
        has_match = (found >> 33) >= least
        for place in tl.static_range(NUM_DRAFTS):
            source = tl.where(has_match, end + place % (length - end), length - 1)
            tl.store(drafts + place * draft_stride + index, tl.load(tokens + source).to(tl.int64))


def ngram_drafts_triton(last: LastDrafts, table: TokenTable, lengths: NgramLengths, drafts: Tensor) -> None:
    _ngram_drafts_kernel[(len(table.rows),)](
        table.token_ids,
        table.rows,
        last.kept_positions,
        drafts,
        table.token_ids.shape[1],
        lengths.least,
        lengths.most,
        table.token_ids.stride(0),
        drafts.stride(0),
        NUM_DRAFTS=len(drafts),
        LANES=1024,
        num_warps=8,
    )
