"""How often each token that a penalty can touch is in a sequence's output, carried from step to step.

Counting 2000 tokens anew takes as long as a decode step; here a step adds the token that is new. Sequences that leave
the batch are forgotten and counted again when they come back. Knows nothing of logits. It is used in a step, by the
sampler, for rows with penalties.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_worker.execution.sampled_sequence import SampledSequence


class TokenCounts:
    """Repetition penalties touch prompt and output (as in `transformers`), the others the output (as OpenAI's). The
    sequence only ever appends to its output."""

    def __init__(self, sequence: SampledSequence) -> None:
        self._sequence = sequence
        self._places: dict[int, int] = {}
        self._num_counted = 0
        self._token_ids = np.empty(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.float32)
        if sequence.sampling.repetition_penalty != 1.0:
            for token_id in sequence.prompt_token_ids:
                self._place(token_id)

    @property
    def token_ids(self) -> "np.ndarray[Any, Any]":
        """[K] int64, each once."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> "np.ndarray[Any, Any]":
        """[K] float32; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._places)]

    def update(self) -> None:
        output = self._sequence.output_token_ids
        for token_id in output[self._num_counted :]:
            place = self._place(token_id)  # may replace the arrays
            self._counts[place] += 1
        self._num_counted = len(output)

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        return place


class PenaltyCounts:
    """The token counts of a batch's penalised sequences."""

    def __init__(self) -> None:
        self._of: dict[SampledSequence, TokenCounts] = {}

    def keep_only(self, sequences: Sequence[SampledSequence]) -> None:
        penalised = [sequence for sequence in sequences if sequence.sampling.has_penalties]
        self._of = {sequence: self._of.get(sequence) or TokenCounts(sequence) for sequence in penalised}

    def of(self, sequence: SampledSequence) -> TokenCounts | None:
        """With all tokens that are known by now; None if no penalty touches the sequence."""
        counts = self._of.get(sequence)
        if counts is not None:
            counts.update()
        return counts
