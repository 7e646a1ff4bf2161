"""Sample one token for each sequence from the logits of one step.

    sampler.begin(sequences, indices)            before the forward pass: grammar masks, on a CPU
    inputs = sampler.prepare(sequences, indices) host to device; grammars and bad words wait for the previous step
    tokens = sampler.launch(logits, inputs)      enqueues the work; the next step can use tokens.token_ids
    samples = tokens.collect()                   waits: token ids, failures, log-probabilities

The order of operations is vLLM's, so that parameters mean the same:
    min_tokens and bad words, logit bias, repetition + frequency + presence penalties, grammar and allowed tokens,
    then argmax (greedy), or temperature, min-p, top-k, top-p, and a draw

A draw depends only on the distribution and on (seed, output index), so preemption, resume, and replay need no random
state (ADR 0019, 0029, 0171). A row without finite logits, or without an allowed token, fails alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_worker.execution.sampling.logprobs import DeviceLogprobs, launch_logprobs
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampling_inputs import PieceEdits, PieceInputs, SamplingInputs, batch_parameters
from engine_worker.execution.sampling.sampling_pieces import ROWS_AT_ONCE
from engine_worker.execution.sampling.token_counts import PenaltyCounts
from engine_worker.execution.sampling.token_rules import TokenMasks, TokenRules, TokensInFlight
from kernels.sampling.sample_tokens import sample_tokens
from shared.messages import TokenLogprobs

if TYPE_CHECKING:
    from engine_worker.execution.sampling.grammar_masks import GrammarMasks

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a step. Entry i belongs to row i."""

    token_ids: list[int | None]  # None: failed
    failures: dict[int, str] = field(default_factory=dict)  # row -> reason
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # empty if no sequence asks for them


class SampledTokens:
    """Samples that may not be computed yet. On CUDA the copies to the host are enqueued."""

    def __init__(self, inputs: SamplingInputs, token_ids: Tensor, best: Tensor, logprobs: list[DeviceLogprobs | None]):
        self.token_ids = token_ids  # [N] int64 on the device; any id of the vocabulary for failed rows
        self._inputs = inputs
        self._host_token_ids = token_ids.to("cpu", non_blocking=True)
        self._host_best = best.to("cpu", non_blocking=True)
        self._host_logprobs = [None if one is None else one.to_host() for one in logprobs]
        self._copied = _recorded_event() if token_ids.is_cuda else None

    def by_sequence(self) -> dict[SampledSequence, int]:
        """Wait for the device, and return the token of each sequence. May be called before collect()."""
        self._wait()
        return dict(zip(self._inputs.sequences, self._host_token_ids.numpy().tolist(), strict=True))

    def collect(self) -> Samples:
        self._wait()
        refusals = self._inputs.refusals
        failures = {
            row: refusals[sequence.request_id]
            for row, sequence in enumerate(self._inputs.sequences if refusals else ())
            if sequence.request_id in refusals
        }
        for row, best in enumerate(self._host_best.numpy().tolist()):
            if not math.isfinite(best):
                failures.setdefault(row, _failure_message(best))
        token_ids: list[int | None] = self._host_token_ids.numpy().tolist()
        for row in failures:
            token_ids[row] = None
        return Samples(token_ids, failures, self._logprobs())

    def _logprobs(self) -> list[TokenLogprobs | None]:
        if not any(self._host_logprobs):
            return []
        answers: list[TokenLogprobs | None] = []
        for piece, logprobs in zip(self._inputs.pieces, self._host_logprobs, strict=True):
            num_rows = piece.end - piece.first
            answers += [None] * num_rows if logprobs is None else logprobs.per_row(num_rows)
        return answers

    def _wait(self) -> None:
        """Wait for the device. No other code of a step does."""
        if self._copied is not None:
            self._copied.synchronize()


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_rows: int,
        device: torch.device = _CPU,
        grammars: "GrammarMasks | None" = None,
    ) -> None:
        """Allocate the state of a sampler.

        Args:
            vocab_size: Width of the logits.
            eos_token_ids: End-of-sequence tokens of the model.
            max_rows: Maximum of rows in a step: sequences, and drafts.
            device: Device of the logits.
            grammars: Masks of grammars; without them a sequence with a grammar fails.
        """
        self._vocab_size = vocab_size
        self.device = device
        self._batch = batch_parameters([], device)
        self._counts = PenaltyCounts(vocab_size, max_rows, device)
        self._rules = TokenRules(vocab_size, eos_token_ids, device)
        self._grammars = grammars
        self._last_tokens: SampledTokens | None = None

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence], indices: list[int] | None = None) -> Samples:
        """Sample at once: prepare(), launch(), and collect(). `logits` [N, V] are in the order of `sequences`."""
        return self.launch(logits, self.prepare(sequences, indices)).collect()

    def begin(self, sequences: Sequence[SampledSequence], indices: list[int]) -> None:
        """Start work of prepare() for the same sequences beside the forward pass. Optional."""
        self._follow(sequences)
        if self._grammars is not None and self._batch.has_grammars:
            self._grammars.begin(self._batch.sequences, indices)

    def prepare(self, sequences: Sequence[SampledSequence], indices: list[int] | None = None) -> SamplingInputs:
        """Return the inputs of a step on the device.

        launch() of the same inputs must follow, because the counts of penalized rows already include its tokens.

        Args:
            sequences: The sampled sequences.
            indices: Output index of each token to sample; by default the first unknown one.
        """
        if indices is None:
            indices = [sequence.num_output_tokens for sequence in sequences]
        self._follow(sequences)
        in_flight = cache(
            self._last_tokens.by_sequence if self._last_tokens is not None else dict[SampledSequence, int]
        )
        self._counts.prepare(indices)
        forbidden = self._rules.forbidden(indices, in_flight)
        masks, broken = self._masks(indices, in_flight) if self._batch.has_grammars else (None, {})
        masks_by_piece = [self._rules.allowed, {} if masks is None else masks.pieces()]
        pieces = []
        for piece in self._batch.pieces_at(indices, self.device):
            number = piece.first // ROWS_AT_ONCE
            edits = PieceEdits(
                forbidden=forbidden.get(number),
                biases=self._rules.biases.get(number),
                penalties=self._counts.pieces.get(number),
                masks=tuple(masks_of[number] for masks_of in masks_by_piece if number in masks_of),
            )
            pieces.append(replace(piece, edits=edits))
        return SamplingInputs(self._batch.sequences, pieces, refusals=self._rules.refusals | broken)

    def _follow(self, sequences: Sequence[SampledSequence]) -> None:
        if sequences != self._batch.sequences:  # by identity; decode steps usually repeat them
            self._batch = batch_parameters(sequences, self.device)
            self._counts.follow(self._batch.sequences)
            self._rules.follow(self._batch.sequences)
            if self._grammars is not None:
                self._grammars.keep_only(sequences)

    def launch(self, logits: Tensor, inputs: SamplingInputs) -> SampledTokens:
        """Enqueue the sampling. `logits` [N, V] are in the order of the prepared sequences, and not modified."""
        assert logits.shape == (len(inputs.sequences), self._vocab_size)
        drawn = [_draw(logits[piece.first : piece.end], piece) for piece in inputs.pieces]
        token_ids, best, logprobs = zip(*drawn, strict=True)
        self._last_tokens = SampledTokens(inputs, _joined(token_ids), _joined(best), list(logprobs))
        return self._last_tokens

    def forced_tokens(self, sequence: SampledSequence, index: int, token_ids: list[int]) -> list[int]:
        """Return drafts: the only tokens that may follow sampled ones, if the sequence has a grammar.

        Args:
            sequence: A sequence of the last prepared step.
            index: Output index of the first of `token_ids`.
            token_ids: The sampled tokens.
        """
        if self._grammars is None or sequence.sampling.grammar is None:
            return []
        return self._grammars.forced_after(sequence, index, token_ids)

    def _masks(self, indices: list[int], in_flight: TokensInFlight) -> tuple[TokenMasks | None, dict[str, str]]:
        sequences = self._batch.sequences
        if self._grammars is None:
            problem = "grammars need the package llguidance, which this worker does not have"
            return None, {sequence.request_id: problem for sequence in sequences if sequence.sampling.grammar}
        return self._grammars.of(sequences, indices, in_flight)


def _draw(logits: Tensor, piece: PieceInputs) -> tuple[Tensor, Tensor, DeviceLogprobs | None]:
    token_ids, best = sample_tokens(piece.edits.applied_to(logits), piece.rows)
    if piece.edits.penalties is not None:
        piece.edits.penalties.count(token_ids)
    return token_ids, best, launch_logprobs(logits, token_ids, piece.logprobs) if piece.logprobs else None


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _failure_message(best_score: float) -> str:
    if best_score == -math.inf:
        return "no token can be sampled: all are masked"
    return f"the model's logits are not finite ({best_score})"
