"""The sampling parameters of a step, as tensors on the device, built without a wait for it.

A step is prepared while the previous one still samples, so only parameters and token counts of a sequence are read, not
its last token. Grammars and bad words wait for that token during the forward pass (grammar_masks.py, token_rules.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_pieces import ROWS_AT_ONCE, to_device
from engine_worker.execution.sampling.token_counts import PenaltyRows
from engine_worker.execution.sampling.token_rules import ForbiddenScores, ScoreBiases, TokenMasks
from kernels.sampling.sample_tokens import SamplingRows
from kernels.token_bitmask import apply_token_bitmask
from shared.messages import SamplingParams

# A lower temperature overflows float32 logits. Draws at much higher ones already equal the argmax.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that report log-probabilities."""

    rows: Tensor  # [P] int64
    num_top: list[int]  # [P], number of top tokens that each reports in addition to the chosen one
    named: list[tuple[int, ...]]  # [P], the tokens that each reports instead, if any
    named_token_ids: Tensor | None  # [P, longest of `named`] int64, padded with 0; None: no row names tokens


@dataclass(frozen=True, slots=True)
class PieceEdits:
    """Changes to the logits of a piece before its tokens are drawn."""

    forbidden: ForbiddenScores | None = None
    biases: ScoreBiases | None = None
    penalties: PenaltyRows | None = None
    masks: tuple[TokenMasks, ...] = ()  # a token must be allowed by all

    def applied_to(self, logits: Tensor) -> Tensor:
        """Return `logits` [N, V] with the edits, in vLLM's order: a float32 copy, or themselves if there are none."""
        if not (self.forbidden or self.biases or self.penalties or self.masks):
            return logits
        scores = logits.to(torch.float32, copy=True)
        flat = scores.view(-1)
        if self.forbidden is not None:
            flat.index_fill_(0, self.forbidden.places, -math.inf)
        if self.biases is not None:
            flat.index_add_(0, self.biases.places, self.biases.values)
        if self.penalties is not None:
            self.penalties.apply(scores)
        for masks in self.masks:
            apply_token_bitmask(scores, masks.rows, masks.masks)
        return scores


@dataclass(frozen=True, slots=True)
class PieceInputs:
    """Inputs of rows [first, end) of a step."""

    first: int
    end: int
    rows: SamplingRows | None  # None: every row is an argmax
    logprobs: LogprobRows | None
    edits: PieceEdits = PieceEdits()


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    sequences: Sequence[SampledSequence]
    pieces: list[PieceInputs]
    refusals: dict[str, str]  # request id -> why it cannot be sampled

    def lowered_by(self, numbers: Tensor) -> "SamplingInputs":
        """Return the inputs with output indices that are lower by `numbers` [N] int64, known to the device only."""
        pieces = [
            piece
            if piece.rows is None
            else replace(piece, rows=replace(piece.rows, indices=piece.rows.indices - numbers[piece.first : piece.end]))
            for piece in self.pieces
        ]
        return replace(self, pieces=pieces)


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """Parameters that do not change while the same sequences decode, on the device."""

    sequences: Sequence[SampledSequence]
    pieces: list[PieceInputs]  # with the indices of another step, and without edits
    has_grammars: bool

    def pieces_at(self, output_indices: list[int], device: torch.device) -> list[PieceInputs]:
        """Return the pieces with this step's output indices."""
        if all(piece.rows is None for piece in self.pieces):
            return self.pieces
        indices = to_device(np.array(output_indices, dtype=np.int64), device)
        return [
            piece
            if piece.rows is None
            else replace(piece, rows=replace(piece.rows, indices=indices[piece.first : piece.end]))
            for piece in self.pieces
        ]


def batch_parameters(sequences: Sequence[SampledSequence], device: torch.device) -> BatchParameters:
    """Divide `sequences` into pieces: one if nothing copies their logits, else pieces of ROWS_AT_ONCE rows."""
    samplings = [sequence.sampling for sequence in sequences]
    num_rows = len(samplings)
    rows_at_once = ROWS_AT_ONCE if any(map(_copies_scores, samplings)) else max(num_rows, 1)
    pieces = []
    for first in range(0, num_rows, rows_at_once):
        end = min(first + rows_at_once, num_rows)
        part = samplings[first:end]
        pieces.append(PieceInputs(first, end, _sampling_rows(part, device), _logprob_rows(part, device)))
    return BatchParameters(list(sequences), pieces, any(sampling.grammar is not None for sampling in samplings))


def _copies_scores(sampling: SamplingParams) -> bool:
    return bool(
        sampling.has_penalties
        or sampling.logprobs is not None
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.grammar is not None
        or sampling.allowed_token_ids is not None
    )


def _sampling_rows(samplings: list[SamplingParams], device: torch.device) -> SamplingRows | None:
    """Return None if all rows are greedy, so that nothing is sent to the device."""
    random = [row for row, sampling in enumerate(samplings) if not sampling.is_greedy]
    if not random:
        return None
    truncated = [
        row for row in random if samplings[row].top_k > 0 or samplings[row].top_p < 1.0 or samplings[row].min_p > 0.0
    ]
    num_rows = len(samplings)
    # One copy for all parameters, because each costs the host about as much as a kernel launch.
    packed = np.empty(5 * num_rows + len(random) + len(truncated), dtype=np.int64)
    integers = packed[: 5 * num_rows].reshape(5, num_rows)
    numbers = integers.view(np.float64)
    integers[0] = [_signed(sampling.seed) for sampling in samplings]
    integers[1] = [sampling.top_k for sampling in samplings]
    numbers[2] = [sampling.top_p for sampling in samplings]
    numbers[3] = [0.0 if s.is_greedy else max(s.temperature, _MIN_TEMPERATURE) for s in samplings]
    numbers[4] = [math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in samplings]
    packed[5 * num_rows :] = random + truncated
    sent = to_device(packed, device)
    fields = sent[: 5 * num_rows].view(5, num_rows)
    return SamplingRows(
        seeds=fields[0],
        indices=fields[0],
        temperature=fields[3].view(torch.float64),
        log_min_p=fields[4].view(torch.float64),
        top_k=fields[1],
        top_p=fields[2].view(torch.float64),
        random_rows=sent[5 * num_rows : 5 * num_rows + len(random)],
        truncated_rows=sent[5 * num_rows + len(random) :],
    )


def _logprob_rows(samplings: list[SamplingParams], device: torch.device) -> LogprobRows | None:
    asking = [
        (row, sampling.logprobs, sampling.logprob_token_ids)
        for row, sampling in enumerate(samplings)
        if sampling.logprobs is not None
    ]
    if not asking:
        return None
    rows, num_top, named = zip(*asking, strict=True)
    most = max(map(len, named))
    filled = np.array([(*ids, *(0,) * (most - len(ids))) for ids in named], dtype=np.int64) if most else None
    return LogprobRows(
        rows=to_device(np.array(rows, dtype=np.int64), device),
        num_top=list(num_top),
        named=list(named),
        named_token_ids=None if filled is None else to_device(filled, device),
    )


def _signed(seed: int) -> int:
    """Return the seed modulo 2**64, as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
