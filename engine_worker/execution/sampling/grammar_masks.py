"""Bit masks of the tokens that grammars allow next, one mask for each row that has a grammar, drafts included.

    masks.keep_only(sequences)                          when the batch changes
    masks.begin(sequences, indices)                     on a CPU: filled by a thread during the forward pass
    masks.of(sequences, indices, tokens_in_flight)      -> TokenMasks on the device, and failed requests
    masks.forced_after(sequence, index, token_ids)      -> the only tokens that may follow, which are drafts

A matcher depends only on the output tokens, so it is a cache. A preempted, resumed, or forked sequence gets a new one,
which reads the output from its start (1 us per token). It reads drafts only while it fills their masks. The host fills
masks while a GPU runs the forward pass; only `tokens_in_flight` waits for the previous step. An error in a grammar ends
its own request only.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import ge

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens
from numpy.typing import NDArray

from engine_worker.execution.sampling.draft_rows import DraftRow
from engine_worker.execution.sampling.grammar_compiler import GrammarCompiler
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.token_rules import TokenMasks, TokensInFlight
from shared.grammars import GrammarError, shortened
from shared.messages import Grammar

Int32Array = NDArray[np.int32]


@dataclass(slots=True)
class _Progress:
    matcher: LLMatcher
    num_consumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The masks of a sequence: of its row, and of the rows after it, one for each draft."""

    matcher: LLMatcher
    row: int
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class _Filled:
    words: torch.Tensor  # int32: masks, then their rows
    rows: list[int]


@dataclass(frozen=True, slots=True)
class _Begun:
    sequences: Sequence[SampledSequence]
    indices: list[int]
    filling: "Future[tuple[_Filled | None, dict[str, str]]]"


class GrammarMasks:
    def __init__(self, compiler: GrammarCompiler, vocab_size: int, device: torch.device) -> None:
        self._compiler = compiler
        self._progress: dict[SampledSequence, _Progress] = {}
        self._executor: LLExecutor | None = None
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.int32)  # pinned on CUDA: masks, then their rows
        self._thread = ThreadPoolExecutor(1, "masks")  # no thread until one is needed
        self._begun: _Begun | None = None
        self._read = torch.cuda.Event() if device.type == "cuda" else None

    def compile(self, grammar: Grammar) -> None:
        """Compile ahead, so that no step waits for it. Thread-safe.

        Raises:
            GrammarError: If the grammar is invalid.
        """
        self._compiler.compile(grammar)

    def keep_only(self, sequences: Sequence[SampledSequence]) -> None:
        self._end_of_begun()
        kept = set(sequences)
        self._progress = {sequence: self._progress[sequence] for sequence in self._progress if sequence in kept}

    def begin(self, sequences: Sequence[SampledSequence], indices: list[int]) -> None:
        """Start filling the masks of the next of() in a thread, if no token is in flight."""
        known = (sequence.num_output_tokens for sequence in sequences)
        if self._device.type == "cpu" and all(map(ge, known, indices)):
            filling = self._thread.submit(self._filled, sequences, indices, dict[SampledSequence, int])
            self._begun = _Begun(sequences, indices, filling)

    def of(
        self, sequences: Sequence[SampledSequence], indices: list[int], tokens_in_flight: TokensInFlight
    ) -> tuple[TokenMasks | None, dict[str, str]]:
        """Return the masks, or None without grammars, and the failures: request id -> reason.

        Args:
            sequences: The sequences of the step.
            indices: Output index of the token to sample, for each sequence.
            tokens_in_flight: Waits for the previous step and returns its tokens.
        """
        begun = self._end_of_begun()
        if begun is not None and begun.sequences == sequences and begun.indices == indices:
            filled, problems = begun.filling.result()
        else:
            filled, problems = self._filled(sequences, indices, tokens_in_flight)
        return (self._sent(filled) if filled is not None else None), problems

    def forced_after(self, sequence: SampledSequence, index: int, token_ids: list[int]) -> list[int]:
        """Return the tokens that the grammar forces after sampled ones.

        They are those of the likeliest split into tokens. The mask may allow others, so the model has to confirm them.
        There are none if the grammar does not allow the sampled ones, or has an error, which the library keeps.

        Args:
            sequence: A sequence of the last of().
            index: Output index of the first of `token_ids`.
            token_ids: The sampled tokens, which are not in the sequence yet.
        """
        progress = self._progress.get(sequence)
        if progress is None or token_ids[-1] in sequence.stop_token_ids:
            return []
        end = index + len(token_ids)
        unread = token_ids[progress.num_consumed_tokens - index :]
        if progress.num_consumed_tokens > end or not progress.matcher.consume_tokens(unread):
            return []  # of() fails for this sequence, too
        progress.num_consumed_tokens = end
        forced: list[int] = progress.matcher.compute_ff_tokens()
        return forced

    def _end_of_begun(self) -> _Begun | None:
        """Return the masks that begin() started and of() did not collect.

        The thread writes to the buffer and to matchers, so wait for it even if the forward pass failed.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            wait([begun.filling])
        return begun

    def _filled(
        self, sequences: Sequence[SampledSequence], indices: list[int], tokens_in_flight: TokensInFlight
    ) -> tuple["_Filled | None", dict[str, str]]:
        wanted: list[_Wanted] = []
        problems: dict[str, str] = {}
        for row, (sequence, index) in enumerate(zip(sequences, indices, strict=True)):
            if sequence.sampling.grammar is None or isinstance(sequence, DraftRow):
                continue
            try:
                matcher = self._advanced(sequence, index, tokens_in_flight)
                if matcher is not None:
                    wanted.append(_Wanted(matcher, row, _drafts_after(sequences, row)))
            except Exception as error:  # must not affect the other rows
                problems[sequence.request_id] = f"grammar: {error}"
        if not wanted:
            return None, problems
        filled = self._fill(wanted)
        for one in wanted:
            if one.matcher.is_error():
                problems[sequences[one.row].request_id] = f"grammar: {shortened(one.matcher.get_error())}"
        return filled, problems

    def _advanced(self, sequence: SampledSequence, index: int, tokens_in_flight: TokensInFlight) -> LLMatcher | None:
        """Return the matcher after `index` output tokens, or None if the token in flight ends the sequence."""
        progress = self._progress.get(sequence)
        if progress is None:
            assert sequence.sampling.grammar is not None
            progress = _Progress(self._compiler.compile(sequence.sampling.grammar).deep_copy())
            self._progress[sequence] = progress
        token_ids = sequence.output_token_ids[progress.num_consumed_tokens : index]
        if sequence.num_output_tokens < index:
            in_flight = tokens_in_flight()[sequence]
            if in_flight in sequence.stop_token_ids:
                return None
            token_ids.append(in_flight)
        if token_ids and not progress.matcher.consume_tokens(token_ids):
            raise GrammarError(shortened(progress.matcher.get_error()))
        progress.num_consumed_tokens = index
        return progress.matcher

    def _fill(self, wanted: list[_Wanted]) -> "_Filled":
        if self._read is not None:
            self._read.synchronize()
        rows = [one.row + number for one in wanted for number in range(1 + len(one.drafts))]
        num_mask_words = len(rows) * self._num_words
        num_words = num_mask_words + len(rows)
        if num_words > len(self._buffer):
            self._buffer = torch.empty(2 * num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        if self._executor is None:
            self._executor = LLExecutor()
        words: Int32Array = self._buffer[:num_words].numpy()
        words[num_mask_words:] = rows
        masks = words[:num_mask_words].reshape(len(rows), self._num_words)
        plain, drafted, end = [], [], 0
        for one in wanted:
            first, end = end, end + 1 + len(one.drafts)
            if one.drafts:
                drafted.append((one.matcher, first, one.drafts))
                masks[first + 1 : end] = -1  # after a forbidden draft the library fills none, and none matters
            else:
                plain.append((one.matcher, first))
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        return _Filled(self._buffer[:num_words], rows)

    def _sent(self, filled: "_Filled") -> TokenMasks:
        sent = filled.words.to(self._device, non_blocking=True)
        if self._read is not None:
            self._read.record()
        num_rows = len(filled.rows)
        num_mask_words = num_rows * self._num_words
        return TokenMasks(filled.rows, sent[num_mask_words:], sent[:num_mask_words].view(num_rows, self._num_words))


def _drafts_after(sequences: Sequence[SampledSequence], row: int) -> list[int]:
    """Return the drafts of the sequence of a row, whose own rows follow it."""
    following = takewhile(lambda one: isinstance(one, DraftRow), islice(sequences, row + 1, None))
    return [one.drafts[-1] for one in following if isinstance(one, DraftRow)]
