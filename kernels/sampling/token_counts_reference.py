"""The reference of token_counts.py, where the contract is, with torch; it serves CPU tensors."""

import torch
from torch import Tensor

MAX_COUNT = 2**15 - 1
_IN_PROMPT = -(2**15)


def recount_reference(counts: Tensor, rows: Tensor, token_ids: Tensor, spans: Tensor) -> None:
    """Do what recount() does, with torch."""
    width = counts.shape[1]
    for row, (prompt, prompt_end, output, output_end) in zip(rows.tolist(), spans.tolist(), strict=True):
        drawn = torch.bincount(token_ids[output:output_end], minlength=width).clamp_(max=MAX_COUNT)
        counts[row] = drawn.to(torch.int16)
        in_prompt = token_ids[prompt:prompt_end].long()
        counts[row, in_prompt] |= _IN_PROMPT


def count_drawn_reference(counts: Tensor, rows: Tensor, score_rows: Tensor, token_ids: Tensor) -> None:
    """Do what count_drawn() does, with torch."""
    drawn = token_ids[score_rows]
    found = counts[rows, drawn]
    counts[rows, drawn] = found + (found & MAX_COUNT < MAX_COUNT)


def apply_penalties_reference(
    scores: Tensor, score_rows: Tensor, counts: Tensor, rows: Tensor, penalties: Tensor
) -> None:
    """Do what apply_penalties() does, with torch."""
    found = counts[rows, : scores.shape[1]]
    places, token_ids = found.nonzero(as_tuple=True)
    count = found[places, token_ids] & MAX_COUNT
    repetition, frequency, presence = penalties[places].unbind(1)
    values = scores[score_rows[places], token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[score_rows[places], token_ids] = values - frequency * count - presence * (count > 0)
