"""draft_inputs.py on CUDA."""

import triton
import triton.language as tl

from kernels.draft_inputs_reference import MAX_DRAFTS, DraftPlaces, LastDrafts, SampledStep


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _begin_drafts_kernel(
    token_ids, positions, query_start_loc, logits_indices, sampled, following, first_samples, last_samples,
    next_token_ids, kept_rows, kept_positions, num_rows, num_sequences, MAX_DRAFTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    if index < num_rows:
        start, end = tl.load(query_start_loc + index), tl.load(query_start_loc + index + 1)
        after = tl.load(following + index)
        drawn = tl.load(sampled + tl.maximum(-1 - after, 0), mask=after < 0, other=0)
        last_token = tl.where(after < 0, drawn, after.to(tl.int64))
        for first in range(start, end, LANES):
            token = first + tl.arange(0, LANES)
            inner = tl.load(token_ids + token + 1, mask=token < end - 1, other=0)
            tl.store(next_token_ids + token, tl.where(token == end - 1, last_token, inner), mask=token < end)
    if index < num_sequences:
        kept, last = tl.load(first_samples + index), tl.load(last_samples + index)
        is_there = last >= 0
        is_right = is_there
        for _ in tl.static_range(MAX_DRAFTS):
            may_go_on = is_right & (kept < last)
            row = tl.load(logits_indices + kept + 1, mask=may_go_on, other=0)
            draft = tl.load(token_ids + row, mask=may_go_on, other=-1)
            is_right = may_go_on & (draft == tl.load(sampled + kept, mask=may_go_on, other=-2))
            kept += is_right.to(tl.int32)
        row = tl.load(logits_indices + kept, mask=is_there, other=0)
        tl.store(kept_rows + index, row)
        position = tl.load(positions + row, mask=is_there, other=-1)
        tl.store(kept_positions + index, position.to(tl.int32))


def begin_drafts_triton(step: SampledStep, last: LastDrafts) -> None:
    num_rows, num_sequences = len(step.following), len(step.first_samples)
    _begin_drafts_kernel[(max(num_rows, num_sequences),)](
        step.token_ids,
        step.positions,
        step.query_start_loc,
        step.logits_indices,
        step.sampled,
        step.following,
        step.first_samples,
        step.last_samples,
        last.next_token_ids,
        last.kept_rows,
        last.kept_positions,
        num_rows,
        num_sequences,
        MAX_DRAFTS=MAX_DRAFTS,
        LANES=256,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["number", "max_len", "table_stride"])
def _place_drafts_kernel(
    kept_positions, positions, seq_lens, slot_mapping, block_tables, number, max_len, table_stride, group_stride,
    slot_stride, NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    kept = tl.load(kept_positions + index)
    is_there = kept >= 0
    position = tl.where(is_there, tl.minimum(kept + number, max_len - 1), 0)
    tl.store(positions + index, position.to(tl.int64))
    tl.store(seq_lens + index, tl.where(is_there, position + 1, 0))
    for group in tl.static_range(NUM_GROUPS):
        table = block_tables + group * group_stride + index.to(tl.int64) * table_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slot_mapping + group * slot_stride + index, tl.where(is_there, slot, 0))


def place_drafts_triton(places: DraftPlaces, number: int, max_len: int, block_size: int) -> None:
    _place_drafts_kernel[(len(places.positions),)](
        places.kept_positions,
        places.positions,
        places.seq_lens,
        places.slot_mapping,
        places.block_tables,
        number,
        max_len,
        places.block_tables.stride(1),
        places.block_tables.stride(0),
        places.slot_mapping.stride(0),
        NUM_GROUPS=len(places.block_tables),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
