"""ngram_drafts.py in torch, and its arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.draft_inputs_reference import LastDrafts, SampledStep


@dataclass(frozen=True, slots=True)
class NgramLengths:
    """How many of the last tokens must have occurred before, and how many are compared."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Tokens of sequences by position, and the rows of the Q sequences of a step."""

    token_ids: Tensor  # [R, L] int32
    rows: Tensor  # [Q] int32


def record_tokens_reference(step: SampledStep, last: LastDrafts, table: TokenTable) -> None:
    max_len, rows = table.token_ids.shape[1], step.logits_indices.tolist()
    firsts, ends, kept_positions = (
        values.tolist() for values in (step.first_samples, step.last_samples, last.kept_positions)
    )
    for index, row in enumerate(table.rows.tolist()):
        kept = kept_positions[index]
        for token in rows[firsts[index] : ends[index] + 1]:
            if step.positions[token] <= kept:
                table.token_ids[row, step.positions[token]] = step.token_ids[token]
        if 0 <= kept < max_len - 1:
            table.token_ids[row, kept + 1] = last.next_token_ids[last.kept_rows[index]]


def ngram_drafts_reference(last: LastDrafts, table: TokenTable, lengths: NgramLengths, drafts: Tensor) -> None:
    max_len, number = table.token_ids.shape[1], len(drafts)
    for index, row in enumerate(table.rows.tolist()):
        length = min(int(last.kept_positions[index]) + 2, max_len)
        if length > 1:
            drafts[:, index] = _continued(table.token_ids[row, :length].tolist(), lengths, number)


def _continued(tokens: list[int], lengths: NgramLengths, number: int) -> Tensor:
    ends, length = list(range(1, len(tokens))), 0
    while length < lengths.most:
        longer = [end for end in ends if end > length and tokens[end - 1 - length] == tokens[-1 - length]]
        if not longer:
            break
        ends, length = longer, length + 1
    if length < lengths.least:
        return torch.full((number,), tokens[-1])
    followed = [end for end in ends if end + number <= len(tokens)]
    end = (followed or ends)[-1]
    return torch.tensor([tokens[end + place % (len(tokens) - end)] for place in range(number)])
