"""Token counts of the penalized sequences of a batch: one row of device memory each, while a sequence is in the batch.

A row is counted from the tokens when its sequence joins or rejoins. Then the device adds each token that it draws, so
a step can be prepared while the previous token is in flight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_pieces import ROWS_AT_ONCE, piece_bounds, to_device
from kernels.sampling.token_counts import apply_penalties, count_drawn, new_counts, recount

_TOKENS_AT_ONCE = 2**18  # in one copy: 1 MiB, unless one sequence is longer

_Stale = list[tuple[SampledSequence, int]]  # sequences, and the number of output tokens to count


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The penalized rows of one piece of a batch."""

    counts: Tensor  # [max_num_seqs, W] int16
    score_rows: Tensor  # [P] int32, rows of the piece
    count_rows: Tensor  # [P] int32, rows of `counts`
    penalties: Tensor  # [P, 3] float32: repetition, frequency, presence

    def apply(self, scores: Tensor) -> None:
        """Penalize `scores` [N, V] float32 in place."""
        apply_penalties(scores, self.score_rows, self.counts, self.count_rows, self.penalties)

    def count(self, token_ids: Tensor) -> None:
        """Add drawn tokens: `token_ids` [N], int64, one for each row of the piece."""
        count_drawn(self.counts, self.count_rows, self.score_rows, token_ids)


class PenaltyCounts:
    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        """Allocate 2 bytes per token of the vocabulary and sequence."""
        self._counts = new_counts(max_num_seqs, vocab_size, device)
        self._device = device
        self._free_rows = list(range(max_num_seqs))
        self._row_of: dict[SampledSequence, int] = {}
        self._batch_rows: list[int] = []  # beside _row_of: rows of the batch
        # Beside it: output tokens in the counts, with the one in flight; -1: no row yet.
        self._num_counted: list[int] = []
        self.pieces: dict[int, PenaltyRows] = {}  # by number

    def follow(self, sequences: Sequence[SampledSequence]) -> None:
        """Assign a row to each penalized sequence of a new batch, and free all other rows."""
        num_counted = dict(zip(self._row_of, self._num_counted, strict=True))
        penalized = [(row, one) for row, one in enumerate(sequences) if one.sampling.has_penalties]
        staying = {sequence for _, sequence in penalized}
        self._free_rows += [row for sequence, row in self._row_of.items() if sequence not in staying]
        row_of = self._row_of
        self._row_of = {one: row_of[one] if one in row_of else self._free_rows.pop() for _, one in penalized}
        self._batch_rows = [row for row, _ in penalized]
        self._num_counted = [num_counted.get(one, -1) for _, one in penalized]
        self.pieces = self._sent()

    def prepare(self, indices: list[int]) -> None:
        """Update the counts to the output before `indices[row]`. The next drawn token is counted when it is drawn."""
        wanted = [indices[row] for row in self._batch_rows]
        if wanted != self._num_counted:
            pairs = zip(self._row_of, wanted, self._num_counted, strict=True)
            for stale in _in_parts([(sequence, index) for sequence, index, counted in pairs if index != counted]):
                self._recount(stale)
        self._num_counted = [index + 1 for index in wanted]

    def _recount(self, stale: _Stale) -> None:
        """Send the tokens of `stale` in one copy. Sequences of one request share those of their prompt."""
        spans: list[tuple[int, int, int, int]] = []
        parts: list[NDArray[np.int32]] = []
        prompts: dict[int, tuple[int, int]] = {}
        num_tokens = 0
        for sequence, index in stale:
            assert index <= sequence.num_output_tokens, "a token in flight is counted when it is drawn"
            prompt = sequence.prompt_token_ids if sequence.sampling.repetition_penalty != 1.0 else []
            if id(prompt) not in prompts or not prompt:
                prompts[id(prompt)] = num_tokens, num_tokens + len(prompt)
                parts.append(np.array(prompt, dtype=np.int32))
                num_tokens += len(prompt)
            spans.append((*prompts[id(prompt)], num_tokens, num_tokens + index))
            parts.append(np.array(sequence.output_token_ids[:index], dtype=np.int32))
            num_tokens += index
        rows = np.array([self._row_of[sequence] for sequence, _ in stale], dtype=np.int32)
        sent = to_device(np.concatenate((rows, np.array(spans, dtype=np.int32).ravel(), *parts)), self._device)
        num_rows = len(stale)
        recount(self._counts, sent[:num_rows], sent[5 * num_rows :], sent[num_rows : 5 * num_rows].view(num_rows, 4))

    def _sent(self) -> dict[int, PenaltyRows]:
        if not self._row_of:
            return {}
        samplings = [sequence.sampling for sequence in self._row_of]
        rows = np.array(self._batch_rows, dtype=np.int32)
        penalties = np.array(
            [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in samplings], dtype=np.float32
        )
        count_rows = np.array(list(self._row_of.values()), dtype=np.int32)
        packed = np.concatenate((rows % ROWS_AT_ONCE, count_rows, penalties.view(np.int32).ravel()))
        sent = to_device(packed, self._device)
        num_rows = len(rows)
        sent_penalties = sent[2 * num_rows :].view(torch.float32).view(num_rows, 3)
        return {
            number: PenaltyRows(
                self._counts, sent[first:end], sent[num_rows + first : num_rows + end], sent_penalties[first:end]
            )
            for number, (first, end) in piece_bounds(rows).items()
        }


def _in_parts(stale: _Stale) -> Iterator[_Stale]:
    part: _Stale = []
    num_tokens = 0
    for sequence, index in stale:
        part.append((sequence, index))
        num_tokens += len(sequence.prompt_token_ids) + index
        if num_tokens >= _TOKENS_AT_ONCE:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part
