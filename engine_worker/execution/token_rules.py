"""Rules of requests for single tokens: the only ones that are allowed, and the words that must not be completed.

    rules.keep_only(sequences)                          when the batch changes
    rules.allowed                                       -> TokenMasks on the device, or None
    rules.word_ends(sequence, index, tokens_in_flight)  -> tokens that would complete a word at this index

A word is found in the output alone, not across the prompt's end (as in vLLM), so what is forbidden follows from the
output's tokens: nothing is lost with a preemption or a takeover. Knows nothing of scores. It is used in a step, between
the forward pass and the draw.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine_worker.execution.sampled_sequence import SampledSequence
from engine_worker.execution.sampling_inputs import TokenMasks, to_device

TokensInFlight = Callable[[], Mapping[SampledSequence, int]]


class TokenRules:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.allowed: TokenMasks | None = None
        self._vocab_size = vocab_size
        self._device = device
        # Kept while a sequence is in the batch: reading a list of 50,000 ids takes 2 ms.
        self._masks: dict[SampledSequence, NDArray[np.int32]] = {}
        self._words: dict[SampledSequence, BadWordIndex] = {}

    def keep_only(self, sequences: Sequence[SampledSequence]) -> None:
        """`sequences`: the rows of the steps that follow."""
        asking = [(row, s) for row, s in enumerate(sequences) if s.sampling.allowed_token_ids is not None]
        self._masks = {sequence: self._mask_of(sequence) for _, sequence in asking}
        self._words = {
            sequence: self._words.get(sequence) or BadWordIndex(sequence.sampling.bad_words)
            for sequence in sequences
            if sequence.sampling.bad_words
        }
        self.allowed = None
        if asking:
            rows = np.array([row for row, _ in asking], dtype=np.int32)
            masks = np.stack(list(self._masks.values()))
            self.allowed = TokenMasks(to_device(rows, self._device), to_device(masks, self._device))

    def word_ends(self, sequence: SampledSequence, index: int, tokens_in_flight: TokensInFlight) -> list[int]:
        """`index`: of the token that is to be sampled, in the output of `sequence`."""
        words = self._words.get(sequence)
        if words is None:
            return []
        before = sequence.output_token_ids[max(0, index - words.longest_beginning) : index]
        if sequence.num_output_tokens < index and words.longest_beginning:
            before.append(tokens_in_flight()[sequence])
        return words.after(before)

    def _mask_of(self, sequence: SampledSequence) -> NDArray[np.int32]:
        """[ceil(V / 32)]; see kernels.token_bitmask."""
        mask = self._masks.get(sequence)
        if mask is None:
            bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
            bits[np.array(sequence.sampling.allowed_token_ids, dtype=np.int64)] = 1
            mask = np.packbits(bits, bitorder="little").view(np.int32)
        return mask


class BadWordIndex:
    """An index of bad words by their beginnings: a thousand take as long as one, a look-up for each length of these."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for *beginning, end in words:
            self._ends.setdefault(tuple(beginning), []).append(end)
        self._lengths = sorted({len(beginning) for beginning in self._ends})
        self.longest_beginning = self._lengths[-1]

    def after(self, token_ids: list[int]) -> list[int]:
        ends: list[int] = []
        for length in self._lengths:
            if length > len(token_ids):
                break
            ends += self._ends.get(tuple(token_ids[len(token_ids) - length :]), ())
        return ends
