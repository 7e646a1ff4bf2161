"""draft_inputs.py in torch, and its arguments."""

from dataclasses import dataclass

from torch import Tensor

MAX_DRAFTS = 7  # of a sequence in one step


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step and what was sampled in it: S rows of sequences, T tokens, N samples, Q sequences to draft for."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start_loc: Tensor  # [S + 1] int32
    logits_indices: Tensor  # [N] int64, the row of T of each sample
    sampled: Tensor  # [N] int64
    following: Tensor  # [S] int32, the token after each row of S; -1 - n: it is sample n
    first_samples: Tensor  # [Q] int32, the first sample of each sequence
    last_samples: Tensor  # [Q] int32, its last one; -1: padding


@dataclass(frozen=True, slots=True)
class DraftPlaces:
    """Where the passes after the first one compute: one row for each sequence."""

    kept_rows: Tensor  # [Q] int64, the last row of T whose token stands
    kept_positions: Tensor  # [Q] int32, its position; -1: padding
    positions: Tensor  # [Q] int64
    seq_lens: Tensor  # [Q] int32; 0: padding
    slot_mapping: Tensor  # [G, Q] int64
    block_tables: Tensor  # [G, Q, B] int32, of the step


@dataclass(frozen=True, slots=True)
class LastDrafts:
    """What a step left for the next one on the device: Q sequences with up to D drafts each.

    Tensors may be longer than their used part.
    """

    next_token_ids: Tensor  # [P] int64, the token after each of the step's tokens
    kept_rows: Tensor  # [Q] int64, the last token of each sequence that stands
    kept_positions: Tensor  # [Q] int32
    drafts: Tensor  # [D, Q] int64
    lookahead: int  # tokens that are computed after the last one of a step, if all drafts of the step stand


def begin_drafts_reference(step: SampledStep, last: LastDrafts) -> None:
    starts = step.query_start_loc.tolist()
    for row, following in enumerate(step.following.tolist()):
        start, end = starts[row : row + 2]
        if start < end:
            last.next_token_ids[start : end - 1] = step.token_ids[start + 1 : end]
            last.next_token_ids[end - 1] = following if following >= 0 else step.sampled[-1 - following]
    drawn, rows, token_ids = step.sampled.tolist(), step.logits_indices.tolist(), step.token_ids.tolist()
    for index, (first, end) in enumerate(zip(step.first_samples.tolist(), step.last_samples.tolist(), strict=True)):
        kept = first
        while kept < end and token_ids[rows[kept + 1]] == drawn[kept]:
            kept += 1
        last.kept_rows[index] = rows[kept] if end >= 0 else 0
        last.kept_positions[index] = step.positions[rows[kept]] if end >= 0 else -1


def place_drafts_reference(places: DraftPlaces, number: int, max_len: int, block_size: int) -> None:
    is_there = places.kept_positions >= 0
    positions = (places.kept_positions + number).clamp(max=max_len - 1) * is_there
    places.positions.copy_(positions)
    places.seq_lens.copy_((positions + 1) * is_there)
    blocks = (positions // block_size).long().expand(len(places.block_tables), 1, -1).transpose(1, 2)
    slots = places.block_tables.gather(2, blocks).squeeze(2).long() * block_size + positions % block_size
    places.slot_mapping.copy_(slots * is_there)
