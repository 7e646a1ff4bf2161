"""Unpack the host's description of a batch into the input tensors of a network with a paged KV cache.

The description is in host memory, pinned where there is CUDA: the kernel reads it over the bus and no copy is enqueued.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.draft_inputs_reference import LastDrafts


@dataclass(frozen=True, slots=True)
class DescribedBatch:
    """The batch as arrays in host memory: S sequences with G block tables each, T tokens, and N rows of logits.

    An array may be longer than its used part.
    """

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    feedback: Tensor  # [S] int32; -1: the token ids are in token_ids
    token_ids: Tensor  # [T] int32
    block_tables: Tensor  # [G * S * row_stride] int32; a row has as many entries as its seq_len needs
    logits_indices: Tensor  # [N] int32
    num_sequences: int
    num_tokens: int
    num_logits: int
    row_stride: int
    # [3, max S] int32, of recurrent states with drafts: ends of tokens, pending, kept; see describe_states()
    drafted_states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Contiguous device tensors; R = maximum rows, P = maximum tokens, padding included; G = groups."""

    token_ids: Tensor  # [P] int64
    positions: Tensor  # [P] int64
    slot_mapping: Tensor  # [G, P] int64
    query_start_loc: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32
    block_tables: Tensor  # [G, R, B] int32
    logits_indices: Tensor  # [most wanted] int64
    lowered: Tensor  # [P] int64, by how much the position of a token is below the described one
    drafted_states: Tensor | None = None  # [3, R + 1] int32: starts of tokens, pending, kept


def unpack_inputs_reference(
    described: DescribedBatch,
    sampled_token_ids: Tensor,
    inputs: InputTensors,
    size: int | None,
    block_size: int,
    num_logit_rows: int = 0,
    last: LastDrafts | None = None,
) -> None:
    num_sequences, num_tokens = described.num_sequences, described.num_tokens
    num_rows, num_padded_tokens = (num_sequences, num_tokens) if size is None else (size, size)
    starts = described.query_start_loc[: num_sequences + 1].tolist()
    for row in range(num_sequences):
        tokens = slice(starts[row], starts[row + 1])
        seq_len, feedback = int(described.seq_lens[row]), int(described.feedback[row])
        lookahead = last.lookahead if last is not None else 0
        num_blocks = min(-(-(seq_len + lookahead) // block_size), described.row_stride)
        token_ids = described.token_ids[tokens] if feedback < 0 else sampled_token_ids[feedback : feedback + 1]
        if last is not None:
            inputs.lowered[tokens] = 0
        if feedback < -1:
            assert last is not None, "the previous step drafted"
            sequence, number = divmod(-2 - feedback, 8)
            inputs.lowered[tokens] = seq_len - 2 - number - int(last.kept_positions[sequence])
            seq_len -= int(inputs.lowered[tokens])
            before = last.next_token_ids[last.kept_rows[sequence]]
            token_ids = before if number == 0 else last.drafts[number - 1, sequence]
        if described.drafted_states is not None and inputs.drafted_states is not None:
            end, *counts = described.drafted_states[:, row].tolist()
            by = int(described.seq_lens[row]) - seq_len if counts[0] else 0  # a row without tokens has none
            inputs.drafted_states[0, row + 1] = end
            inputs.drafted_states[1:, row] = torch.tensor(counts) - by
        positions = torch.arange(seq_len - (tokens.stop - tokens.start), seq_len)
        inputs.token_ids[tokens] = token_ids.long()
        inputs.positions[tokens] = positions
        for group, (slots, tables) in enumerate(zip(inputs.slot_mapping, inputs.block_tables, strict=True)):
            first = (group * num_sequences + row) * described.row_stride
            table = described.block_tables[first:][:num_blocks]
            slots[tokens] = table.long()[positions // block_size] * block_size + positions % block_size
            tables[row, : len(table)] = table
        inputs.seq_lens[row] = seq_len
    inputs.query_start_loc[: num_sequences + 1] = described.query_start_loc[: num_sequences + 1]
    padding_starts = torch.arange(num_tokens, num_tokens + num_rows - num_sequences + 1).clamp(max=num_padded_tokens)
    inputs.query_start_loc[num_sequences : num_rows + 1] = padding_starts
    inputs.seq_lens[num_sequences:num_rows] = 0
    if inputs.drafted_states is not None:
        starts_of_states, pending, kept = inputs.drafted_states
        starts_of_states[num_sequences + 1 : num_rows + 1] = padding_starts[1:]
        pending[num_sequences:num_rows], kept[num_sequences:num_rows] = 0, 1
    for tensor in (inputs.token_ids, inputs.positions, *inputs.slot_mapping):
        tensor[num_tokens:num_padded_tokens] = 0
    num_logits = described.num_logits
    inputs.logits_indices[:num_logits] = described.logits_indices[:num_logits].long()
    inputs.logits_indices[num_logits : max(num_logits, num_rows, num_logit_rows)] = 0


@triton.jit
def _draft_of_row(feedback, seq_len, next_token_ids, kept_rows, kept_positions, drafts, draft_stride):
    """Return the token of a row whose feedback is less than -1, and by how much its length is lowered; else zeros."""
    is_draft = feedback < -1
    sequence, number = (-2 - feedback) // 8, (-2 - feedback) % 8
    kept = tl.load(kept_rows + sequence, mask=is_draft, other=0)
    before = tl.load(next_token_ids + kept, mask=is_draft & (number == 0), other=0)
    draft = tl.load(drafts + (number - 1) * draft_stride + sequence, mask=is_draft & (number > 0), other=0)
    position = tl.load(kept_positions + sequence, mask=is_draft, other=0) + 1 + number
    return before + draft, tl.where(is_draft, seq_len - 1 - position, 0)


# Counts change from step to step and must not trigger a compilation.
@triton.jit(
    do_not_specialize=[
        "num_sequences", "num_tokens", "num_rows", "num_padded_tokens", "num_logits", "row_stride", "lookahead",
    ]
)  # fmt: skip
def _unpack_inputs_kernel(
    host_query_start_loc, host_seq_lens, host_feedback, host_token_ids, host_tables, host_logits_indices,
    sampled_token_ids, next_token_ids, kept_rows, kept_positions, drafts,
    token_ids, positions, slot_mapping, query_start_loc, seq_lens, block_tables, logits_indices, lowered,
    num_sequences, num_tokens, num_rows, num_padded_tokens, num_logits, row_stride, lookahead,
    slot_stride, group_stride, table_stride, draft_stride,
    HAS_DRAFTS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row < num_sequences:
        start = tl.load(host_query_start_loc + row)
        end = tl.load(host_query_start_loc + row + 1)
        seq_len = tl.load(host_seq_lens + row)
        feedback = tl.load(host_feedback + row)
        lanes = tl.arange(0, LANES)
        num_blocks = tl.minimum(tl.cdiv(seq_len + lookahead, BLOCK_SIZE), row_stride)
        draft = tl.zeros((), tl.int64)
        if HAS_DRAFTS:
            draft, by = _draft_of_row(
                feedback, seq_len, next_token_ids, kept_rows, kept_positions, drafts, draft_stride
            )
            tl.store(lowered + start, by.to(tl.int64), mask=feedback < -1)
            seq_len -= by
        first_position = seq_len - (end - start)
        for group in tl.static_range(NUM_GROUPS):
            host_table = host_tables + (group * num_sequences + row).to(tl.int64) * row_stride
            table = block_tables + group * group_stride + row.to(tl.int64) * table_stride
            for first in range(0, num_blocks, LANES):
                inside = first + lanes < num_blocks
                tl.store(table + first + lanes, tl.load(host_table + first + lanes, mask=inside), mask=inside)
            for first in range(0, end - start, LANES):
                token = start + first + lanes
                inside = token < end
                position = first_position + first + lanes
                block_id = tl.load(host_table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
                tl.store(slot_mapping + group * slot_stride + token, slot, mask=inside)
        for first in range(0, end - start, LANES):
            token = start + first + lanes
            inside = token < end
            position = first_position + first + lanes
            ids = tl.load(host_token_ids + token, mask=inside & (feedback < 0), other=0).to(tl.int64)
            ids += tl.load(sampled_token_ids + feedback + tl.zeros_like(lanes), mask=inside & (feedback >= 0), other=0)
            if HAS_DRAFTS:
                ids += draft
                tl.store(lowered + token, tl.zeros_like(ids), mask=inside & (feedback >= -1))
            tl.store(token_ids + token, ids, mask=inside)
            tl.store(positions + token, position.to(tl.int64), mask=inside)
        tl.store(query_start_loc + row, start)
        tl.store(query_start_loc + row + 1, end)  # the next row writes the same value
        tl.store(seq_lens + row, seq_len)
    elif row < num_rows:
        start = tl.minimum(num_tokens + row - num_sequences, num_padded_tokens)
        end = tl.minimum(start + 1, num_padded_tokens)
        zero = tl.zeros((), tl.int64)
        tl.store(token_ids + start, zero, mask=start < end)
        tl.store(positions + start, zero, mask=start < end)
        for group in tl.static_range(NUM_GROUPS):
            tl.store(slot_mapping + group * slot_stride + start, zero, mask=start < end)
        tl.store(query_start_loc + row, start)
        tl.store(query_start_loc + row + 1, end)
        tl.store(seq_lens + row, 0)
    wanted = tl.load(host_logits_indices + row, mask=row < num_logits, other=0)
    tl.store(logits_indices + row, wanted.to(tl.int64))


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "num_padded_tokens"])
def _unpack_states_kernel(
    host_states, host_seq_lens, seq_lens, states, num_sequences, num_tokens, num_padded_tokens, host_stride, stride
):
    """Write the starts and counts of one row's recurrent state, after its length was lowered."""
    row = tl.program_id(0)
    end = tl.minimum(num_tokens + row - num_sequences + 1, num_padded_tokens)
    pending = 0
    kept = 1
    if row < num_sequences:
        end = tl.load(host_states + row)
        pending = tl.load(host_states + host_stride + row)
        kept = tl.load(host_states + 2 * host_stride + row)
        lowered = tl.load(host_seq_lens + row) - tl.load(seq_lens + row)
        fewer = tl.where(pending > 0, lowered, 0)  # a row without tokens has none
        pending -= fewer
        kept -= fewer
    tl.store(states + row + 1, end)
    tl.store(states + stride + row, pending)
    tl.store(states + 2 * stride + row, kept)


def unpack_inputs_triton(
    described: DescribedBatch,
    sampled_token_ids: Tensor,
    inputs: InputTensors,
    size: int | None,
    block_size: int,
    num_logit_rows: int = 0,
    last: LastDrafts | None = None,
) -> None:
    num_rows, num_padded_tokens = (described.num_sequences, described.num_tokens) if size is None else (size, size)
    assert described.num_sequences <= num_rows <= inputs.seq_lens.shape[0]
    assert described.num_tokens <= num_padded_tokens <= inputs.token_ids.shape[0]
    num_logit_rows = max(num_logit_rows, described.num_logits)
    assert num_logit_rows <= inputs.logits_indices.shape[0] and sampled_token_ids.dtype == torch.int64
    host_states, states = described.drafted_states, inputs.drafted_states
    assert (host_states is None) == (states is None)
    _unpack_inputs_kernel[(max(num_rows, num_logit_rows),)](
        described.query_start_loc,
        described.seq_lens,
        described.feedback,
        described.token_ids,
        described.block_tables,
        described.logits_indices,
        sampled_token_ids,
        last and last.next_token_ids,
        last and last.kept_rows,
        last and last.kept_positions,
        last and last.drafts,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.logits_indices,
        inputs.lowered,
        described.num_sequences,
        described.num_tokens,
        num_rows,
        num_padded_tokens,
        described.num_logits,
        described.row_stride,
        last.lookahead if last is not None else 0,
        inputs.slot_mapping.stride(0),
        *inputs.block_tables.stride()[:2],
        last.drafts.stride(0) if last is not None else 0,
        HAS_DRAFTS=last is not None,
        NUM_GROUPS=len(inputs.block_tables),
        BLOCK_SIZE=block_size,
        LANES=1024,
        num_warps=4,
    )
    if host_states is not None and states is not None:
        _unpack_states_kernel[(num_rows,)](
            host_states,
            described.seq_lens,
            inputs.seq_lens,
            states,
            described.num_sequences,
            described.num_tokens,
            num_padded_tokens,
            host_states.stride(0),
            states.stride(0),
            num_warps=1,
        )


def unpack_inputs(
    described: DescribedBatch,
    sampled_token_ids: Tensor,
    inputs: InputTensors,
    size: int | None,
    block_size: int,
    num_logit_rows: int = 0,
    last: LastDrafts | None = None,
) -> None:
    """Write the inputs of one step.

    Row r is a sequence with tokens [query_start_loc[r], query_start_loc[r + 1]) of the batch, which are its last; their
    positions and slots follow from seq_lens[r] and the block tables. If feedback[r] >= 0 the row has one token,
    sampled_token_ids[feedback[r]], sampled by the previous step and not yet seen by the host. If it is less than -1,
    the token is one that the previous step drafted, -2 - 8 * sequence - draft (0: the token before its drafts). The row
    then follows the last token of its sequence that stands. Its seq_lens[r], and the pending and kept tokens of its
    recurrent state, are upper bounds. Padding rows have one token each, id 0 at position 0 in slot 0, of a sequence of
    length 0, and none when the tokens are used up. Unused logits indices are 0. Logits of a token may be requested
    several times.

    Args:
        described: The batch in host memory.
        sampled_token_ids: [..], int64, on the device, tokens of the previous step.
        inputs: The tensors to write; only what a batch of this size uses is written.
        size: Pad to this many rows and tokens; None: no padding.
        block_size: Slots per block.
        num_logit_rows: Pad the logits indices to this many.
        last: What a draft head made of the previous step; None: there is no head. With a head, the tables also get
            the blocks of the tokens that it computes after those of the step.
    """
    unpack = unpack_inputs_triton if inputs.token_ids.is_cuda else unpack_inputs_reference
    unpack(described, sampled_token_ids, inputs, size, block_size, num_logit_rows, last)
