"""Logits of one step -> one token for each sequence.

    sampler.begin(sequences, indices)            before the forward pass: masks of grammars, on a CPU
    inputs = sampler.prepare(sequences, indices) host -> device; grammars and bad words wait for the step before
    tokens = sampler.launch(logits, inputs)      enqueues the device's work; tokens.token_ids is there for the next step
    samples = tokens.collect()                   waits for it: token ids, failures, log-probabilities

Order of the operations (that of vLLM, so that the same parameters mean the same here):
    min_tokens and bad words masked, logit bias, repetition + frequency + presence penalties,
    the grammar's mask and that of allowed tokens
    then argmax (greedy), or temperature, min-p, top-k, top-p and a draw

A draw depends on the distribution and on (seed, output index) alone: not on the batch, the slot, earlier draws or the
device. So preemption, resume and replay need no random state. docs/adr/0019, 0029 and 0171 have the reasons and costs.

A row whose logits are not finite, or that has no token left, is None in the answer and named in `failures`; the other
rows do not notice.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_worker.execution.logprobs import DeviceLogprobs, launch_logprobs
from engine_worker.execution.sampled_sequence import SampledSequence
from engine_worker.execution.sampling_inputs import PieceEdits, PieceInputs, SamplingInputs, batch_parameters
from engine_worker.execution.sampling_pieces import ROWS_AT_ONCE
from engine_worker.execution.token_counts import PenaltyCounts
from engine_worker.execution.token_rules import TokenMasks, TokenRules, TokensInFlight
from kernels.sampling.sample_tokens import sample_tokens
from shared.messages import TokenLogprobs

if TYPE_CHECKING:
    from engine_worker.execution.grammar_masks import GrammarMasks

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Samples:
    """Entry i belongs to the i-th sequence."""

    token_ids: list[int | None]  # None: failed
    failures: dict[str, str] = field(default_factory=dict)  # request id -> why
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # empty when no sequence asked


class SampledTokens:
    """The device's answer, perhaps not computed yet. On CUDA the copies to the host are enqueued with it."""

    def __init__(self, inputs: SamplingInputs, token_ids: Tensor, best: Tensor, logprobs: list[DeviceLogprobs | None]):
        self.token_ids = token_ids  # [N] int64 on the device; some id of the vocabulary for rows that failed
        self._inputs = inputs
        self._host_token_ids = token_ids.to("cpu", non_blocking=True)
        self._host_best = best.to("cpu", non_blocking=True)
        self._host_logprobs = [None if one is None else one.to_host() for one in logprobs]
        self._copied = _recorded_event() if token_ids.is_cuda else None

    def by_sequence(self) -> dict[SampledSequence, int]:
        """Waits for the device, as collect() does, and may be called before it."""
        self._wait()
        return dict(zip(self._inputs.sequences, self._host_token_ids.numpy().tolist(), strict=True))

    def collect(self) -> Samples:
        self._wait()
        sequences = self._inputs.sequences
        failures = dict(self._inputs.refusals)
        for sequence, best in zip(sequences, self._host_best.numpy().tolist(), strict=True):
            if not math.isfinite(best):
                failures.setdefault(sequence.request_id, _failure_message(best))
        chosen = zip(self._host_token_ids.numpy().tolist(), sequences, strict=True)
        token_ids = [None if sequence.request_id in failures else token_id for token_id, sequence in chosen]
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
        """The only place where the host waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_num_seqs: int,
        device: torch.device = _CPU,
        grammars: "GrammarMasks | None" = None,
    ) -> None:
        """At most `max_num_seqs` sequences are sampled at once. Without `grammars` a sequence that has one fails."""
        self._vocab_size = vocab_size
        self.device = device
        self._batch = batch_parameters([], device)
        self._counts = PenaltyCounts(vocab_size, max_num_seqs, device)
        self._rules = TokenRules(vocab_size, eos_token_ids, device)
        self._grammars = grammars
        self._last_tokens: SampledTokens | None = None

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence], indices: list[int] | None = None) -> Samples:
        """`logits[i]` belongs to `sequences[i]`. Leaves `logits` as they are."""
        return self.launch(logits, self.prepare(sequences, indices)).collect()

    def begin(self, sequences: Sequence[SampledSequence], indices: list[int]) -> None:
        """Do beside the forward pass what prepare() of the same sequences would do after it. May be left out."""
        self._follow(sequences)
        if self._grammars is not None and self._batch.has_grammars:
            self._grammars.begin(self._batch.sequences, indices)

    def prepare(self, sequences: Sequence[SampledSequence], indices: list[int] | None = None) -> SamplingInputs:
        """`indices`: of each sequence's output, the token to sample; by default the first that is not known.

        launch() of the same inputs must follow: the counts of penalized rows are those after it.
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
        if sequences != self._batch.sequences:  # by identity: steps of a decoding batch have the same ones
            self._batch = batch_parameters(sequences, self.device)
            self._counts.follow(self._batch.sequences)
            self._rules.follow(self._batch.sequences)
            if self._grammars is not None:
                self._grammars.keep_only(sequences)

    def launch(self, logits: Tensor, inputs: SamplingInputs) -> SampledTokens:
        """`logits` [N, V] in the order of the prepared sequences; not modified."""
        assert logits.shape == (len(inputs.sequences), self._vocab_size)
        drawn = [_draw(logits[piece.first : piece.end], piece) for piece in inputs.pieces]
        token_ids, best, logprobs = zip(*drawn, strict=True)
        self._last_tokens = SampledTokens(inputs, _joined(token_ids), _joined(best), list(logprobs))
        return self._last_tokens

    def _masks(self, indices: list[int], in_flight: TokensInFlight) -> tuple[TokenMasks | None, dict[str, str]]:
        sequences = self._batch.sequences
        if self._grammars is None:
            problem = "this worker has no llguidance to follow a grammar"
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
        return "no token can be sampled: every one is masked"
    return f"the model's logits are not finite ({best_score})"
