"""How often each token occurs in a sequence, counted on the device, and the penalties that follow from the counts.

    recount(counts, rows, token_ids, spans)                        count the tokens of some rows from their start
    count_drawn(counts, rows, token_ids)                           add the token that each row has drawn
    apply_penalties(scores, score_rows, counts, rows, penalties)   change the scores of the counted tokens

A row of counts [R, W] int16 belongs to one sequence; W is the size of the vocabulary, padded to a multiple of 8. Bit 15
of an entry marks a token of the prompt, and the other bits count it in the output, up to MAX_COUNT. A resumed sequence
and one that never stopped have the same counts, so they have the same scores.

CPU tensors use token_counts_reference.py, CUDA tensors token_counts_triton.py.
"""

import torch
from torch import Tensor

from kernels.sampling.token_counts_reference import (
    apply_penalties_reference,
    count_drawn_reference,
    recount_reference,
)


def new_counts(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return [num_rows, W] int16 counts. Rows hold nothing valid until recount()."""
    return torch.empty(num_rows, counts_width(vocab_size), dtype=torch.int16, device=device)


def counts_width(vocab_size: int) -> int:
    """Return W: an atomic addition changes two counts of 16 bits in one aligned word of 32."""
    return -(-vocab_size // 8) * 8


def recount(counts: Tensor, rows: Tensor, token_ids: Tensor, spans: Tensor) -> None:
    """Replace rows of `counts`.

    Args:
        counts: [R, W], int16, modified in place.
        rows: [K], int32, rows of `counts`, none twice.
        token_ids: [T], int32, ids of prompts and outputs.
        spans: [K, 4], int32: first and end of each row's prompt in `token_ids`, then of its output. Rows may share
            a span. An empty prompt is one that no penalty touches.
    """
    if counts.is_cuda:
        from kernels.sampling.token_counts_triton import recount_triton  # noqa: PLC0415 - a CPU has no triton

        recount_triton(counts, rows, token_ids, spans)
    else:
        recount_reference(counts, rows, token_ids, spans)


def count_drawn(counts: Tensor, rows: Tensor, score_rows: Tensor, token_ids: Tensor) -> None:
    """Add one output token to each of `rows` of `counts`.

    Args:
        counts: [R, W], int16, modified in place.
        rows: [P], int32, rows of `counts`, none twice.
        score_rows: [P], int32, the entry of `token_ids` of each row.
        token_ids: [N], int64.
    """
    if counts.is_cuda:
        from kernels.sampling.token_counts_triton import count_drawn_triton  # noqa: PLC0415 - a CPU has no triton

        count_drawn_triton(counts, rows, score_rows, token_ids)
    else:
        count_drawn_reference(counts, rows, score_rows, token_ids)


def apply_penalties(scores: Tensor, score_rows: Tensor, counts: Tensor, rows: Tensor, penalties: Tensor) -> None:
    """Penalize the scores of tokens that occur: repetition in prompt and output, frequency and presence in the output.

    Args:
        scores: [N, V], float32, contiguous, modified in place.
        score_rows: [P], int32, rows of `scores`, none twice.
        counts: [R, W], int16.
        rows: [P], int32, the row of `counts` of each score row.
        penalties: [P, 3], float32: repetition, frequency, presence.

    Source: repetition, https://arxiv.org/abs/1909.05858; frequency and presence, OpenAI's API reference.
    """
    if scores.is_cuda:
        from kernels.sampling.token_counts_triton import apply_penalties_triton  # noqa: PLC0415 - a CPU has no triton

        apply_penalties_triton(scores, score_rows, counts, rows, penalties)
    else:
        apply_penalties_reference(scores, score_rows, counts, rows, penalties)
