"""Rules of requests for single tokens: allowed and forbidden ones, biases, and words that must not be completed.

    rules.follow(sequences)                      when the batch changes
    rules.allowed, rules.biases                  on the device, until the batch changes again
    rules.forbidden(indices, tokens_in_flight)   -> tokens that are masked in this step

Bad words are found in the output only, not across the end of the prompt (as in vLLM). The masks depend only on output
tokens, so a preemption or a takeover does not change them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_pieces import ROWS_AT_ONCE, piece_bounds, to_device
from shared.messages import SamplingParams

TokensInFlight = Callable[[], Mapping[SampledSequence, int]]

_ALWAYS = 2**31 - 1  # above every output index


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some rows allow, in the format of kernels.token_bitmask."""

    batch_rows: list[int]  # [R], ascending
    rows: Tensor  # [R] int32, the same on the device
    masks: Tensor  # [R, ceil(V / 32)] int32

    def pieces(self) -> "dict[int, TokenMasks]":
        """Return the masks of each piece, with rows of the piece."""
        return {
            number: TokenMasks(
                self.batch_rows[first:end],
                self.rows[first:end] - number * ROWS_AT_ONCE if number else self.rows[first:end],
                self.masks[first:end],
            )
            for number, (first, end) in piece_bounds(self.batch_rows).items()
        }


@dataclass(frozen=True, slots=True)
class ForbiddenScores:
    """Masked logits of one piece."""

    places: Tensor  # [M] int64: row * V + token id


@dataclass(frozen=True, slots=True)
class ScoreBiases:
    """Biases of one piece's logits."""

    places: Tensor  # [M] int64: row * V + token id, unique
    values: Tensor  # [M] float32


class TokenRules:
    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self.allowed: dict[int, TokenMasks] = {}  # by piece
        self.biases: dict[int, ScoreBiases] = {}  # by piece
        self.refusals: dict[str, str] = {}  # request id -> why it cannot be sampled
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        # Cached while a sequence is in the batch, because reading a list of 50,000 ids takes 2 ms.
        self._of: dict[SampledSequence, _Rules] = {}
        self._with_words: list[tuple[int, SampledSequence, BadWordIndex]] = []
        self._forbidden = _Forbidden.of([])

    def follow(self, sequences: Sequence[SampledSequence]) -> None:
        """Read the rules of a new batch."""
        with_rules = [(row, one) for row, one in enumerate(sequences) if _has_rules(one.sampling)]
        self._of = {sequence: self._of.get(sequence) or self._read(sequence) for _, sequence in with_rules}
        rules = [(row, self._of[sequence]) for row, sequence in with_rules]
        refusals = ((one.request_id, self._of[one].refusal) for _, one in with_rules)
        self.refusals = {request_id: refusal for request_id, refusal in refusals if refusal is not None}
        self._with_words = [(row, one, words) for row, one in with_rules if (words := self._of[one].words) is not None]
        self._forbidden = _Forbidden.of([(row, one.forbidden_until) for row, one in rules])
        self.allowed = self._sent_masks([(row, one.mask) for row, one in rules if one.mask is not None])
        self.biases = self._sent_biases([(row, one) for row, one in rules if len(one.biased)])

    def forbidden(self, indices: list[int], tokens_in_flight: TokensInFlight) -> dict[int, ForbiddenScores]:
        """Return the masked logits by piece. `indices` are the output indices of the tokens to sample."""
        if not self._with_words and not len(self._forbidden.rows):
            return {}
        rows, token_ids = self._forbidden.at(indices)
        if self._with_words:
            ends = list(self._word_ends(indices, tokens_in_flight))
            rows = np.concatenate((rows, np.array([row for row, _ in ends], dtype=np.int64)))
            token_ids = np.concatenate((token_ids, np.array([token_id for _, token_id in ends], dtype=np.int64)))
        if not len(rows):  # all rows have reached min_tokens, and no bad word is near
            return {}
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        places = self._sent_places(rows, token_ids[order])
        return {number: ForbiddenScores(places[first:end]) for number, (first, end) in piece_bounds(rows).items()}

    def _word_ends(self, indices: list[int], tokens_in_flight: TokensInFlight) -> Iterator[tuple[int, int]]:
        for row, sequence, words in self._with_words:
            index = indices[row]
            before = sequence.output_token_ids[max(0, index - words.longest_beginning) : index]
            if sequence.num_output_tokens < index:
                before.append(tokens_in_flight()[sequence])
            for token_id in words.after(before):
                yield row, token_id

    def _read(self, sequence: SampledSequence) -> "_Rules":
        sampling, vocab_size = sequence.sampling, self._vocab_size
        outside = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < vocab_size]
        ending = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos_token_ids)
        until = {token_id: sampling.min_tokens for token_id in ending if 0 <= token_id < vocab_size}
        until |= {word[0]: _ALWAYS for word in sampling.bad_words if len(word) == 1}
        longer = tuple(word for word in sampling.bad_words if len(word) > 1)
        biases = {} if outside else sampling.logit_bias
        return _Rules(
            mask=None if sampling.allowed_token_ids is None else self._mask(sampling.allowed_token_ids),
            words=BadWordIndex(longer) if longer else None,
            forbidden_until={token_id: index for token_id, index in until.items() if index},
            biased=np.fromiter(biases.keys(), dtype=np.int64, count=len(biases)),
            biases=np.fromiter(biases.values(), dtype=np.float32, count=len(biases)),
            refusal=f"logit_bias: expected token ids below {vocab_size}, got {outside[0]}" if outside else None,
        )

    def _mask(self, allowed_token_ids: tuple[int, ...]) -> NDArray[np.int32]:
        """Return [ceil(V / 32)]; see kernels.token_bitmask."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        bits[np.array(allowed_token_ids, dtype=np.int64)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _sent_masks(self, masks: list[tuple[int, NDArray[np.int32]]]) -> dict[int, TokenMasks]:
        if not masks:
            return {}
        rows = [row for row, _ in masks]
        sent = to_device(np.array(rows, dtype=np.int32), self._device)
        return TokenMasks(rows, sent, to_device(np.stack([mask for _, mask in masks]), self._device)).pieces()

    def _sent_biases(self, biased: "list[tuple[int, _Rules]]") -> dict[int, ScoreBiases]:
        if not biased:
            return {}
        rows = np.repeat(np.array([row for row, _ in biased]), [len(one.biased) for _, one in biased])
        places = self._sent_places(rows, np.concatenate([one.biased for _, one in biased]))
        values = to_device(np.concatenate([one.biases for _, one in biased]), self._device)
        return {
            number: ScoreBiases(places[first:end], values[first:end])
            for number, (first, end) in piece_bounds(rows).items()
        }

    def _sent_places(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> Tensor:
        return to_device(rows % ROWS_AT_ONCE * self._vocab_size + token_ids, self._device)


def _has_rules(sampling: SamplingParams) -> bool:
    return bool(
        sampling.min_tokens or sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids is not None
    )


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of one sequence, as arrays."""

    mask: NDArray[np.int32] | None
    words: "BadWordIndex | None"  # of more than one token
    forbidden_until: dict[int, int]  # token id -> the first output index where it may be sampled
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]
    refusal: str | None


@dataclass(frozen=True, slots=True)
class _Forbidden:
    """Tokens that are forbidden up to an output index: those that end a sequence, and one-token bad words."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    until: NDArray[np.int64]

    @classmethod
    def of(cls, rules: list[tuple[int, dict[int, int]]]) -> "_Forbidden":
        entries = chain.from_iterable(((row, *entry) for entry in until.items()) for row, until in rules)
        table = np.array(list(entries), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2])

    def at(self, indices: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows and token ids of the masked logits, where `indices[row]` is the output index to sample."""
        active = np.array(indices)[self.rows] < self.until
        return self.rows[active], self.token_ids[active]


class BadWordIndex:
    """An index of bad words by their beginnings. A look-up per length, so a thousand words cost as much as one."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for *beginning, end in words:
            self._ends.setdefault(tuple(beginning), []).append(end)
        self._lengths = sorted({len(beginning) for beginning in self._ends})
        self.longest_beginning = self._lengths[-1]

    def after(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that would complete a word after `token_ids`."""
        ends: list[int] = []
        for length in self._lengths:
            if length > len(token_ids):
                break
            ends += self._ends.get(tuple(token_ids[len(token_ids) - length :]), ())
        return ends
