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
device. So preemption, resume and replay need no random state, and penalties are recounted from the token ids each step
for the same reason. docs/adr/0019 and 0029 have the reasons and the cost.

A row whose logits are not finite, or that has no token left, is None in the answer and named in `failures`; the other
rows do not notice.

The first step of a token's way back. It knows nothing of blocks, of the model, or of when a sequence ends.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_worker.execution.logprobs import DeviceLogprobs, launch_logprobs
from engine_worker.execution.sampled_sequence import SampledSequence
from engine_worker.execution.sampling_inputs import (
    SamplingInputs,
    ScoreEdits,
    TokenMasks,
    batch_parameters,
    premature_ends,
    score_edits,
)
from engine_worker.execution.token_counts import PenaltyCounts
from engine_worker.execution.token_rules import TokenRules, TokensInFlight
from kernels.sampling.sample_tokens import sample_tokens
from kernels.token_bitmask import apply_token_bitmask
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

    def __init__(self, inputs: SamplingInputs, token_ids: Tensor, best: Tensor, logprobs: DeviceLogprobs | None):
        self.token_ids = token_ids  # [N] int64 on the device; some id of the vocabulary for rows that failed
        self._inputs = inputs
        self._host_token_ids = token_ids.to("cpu", non_blocking=True)
        self._host_best = best.to("cpu", non_blocking=True)
        self._host_logprobs = logprobs.to_host() if logprobs else None
        self._copied = _recorded_event() if token_ids.is_cuda else None

    def by_sequence(self) -> dict[SampledSequence, int]:
        """Waits for the device, as collect() does, and may be called before it."""
        self._wait()
        return dict(zip(self._inputs.sequences, self._host_token_ids.tolist(), strict=True))

    def collect(self) -> Samples:
        self._wait()
        sequences = self._inputs.sequences
        failures = dict(self._inputs.refusals)
        for sequence, best in zip(sequences, self._host_best.tolist(), strict=True):
            if not math.isfinite(best):
                failures.setdefault(sequence.request_id, _failure_message(best))
        chosen = zip(self._host_token_ids.tolist(), sequences, strict=True)
        token_ids = [None if sequence.request_id in failures else token_id for token_id, sequence in chosen]
        logprobs = self._host_logprobs.per_row(len(sequences)) if self._host_logprobs else []
        return Samples(token_ids, failures, logprobs)

    def _wait(self) -> None:
        """The only place where the host waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device = _CPU,
        grammars: "GrammarMasks | None" = None,
    ) -> None:
        """Without `grammars` a sequence that has one fails."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self.device = device
        self._batch = batch_parameters([], device)
        self._penalty_counts = PenaltyCounts()
        self._rules = TokenRules(vocab_size, device)
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
        """`indices`: of each sequence's output, the token to sample; by default the first that is not known."""
        if indices is None:
            indices = [sequence.num_output_tokens for sequence in sequences]
        self._follow(sequences)
        edits: ScoreEdits | None = None
        refusals: dict[str, str] = {}
        in_flight = cache(
            self._last_tokens.by_sequence if self._last_tokens is not None else dict[SampledSequence, int]
        )
        if self._batch.may_edit:
            masked = [
                [*premature_ends(sequence, index, self._eos_token_ids, self._vocab_size),
                 *self._rules.word_ends(sequence, index, in_flight)]
                for sequence, index in zip(sequences, indices, strict=True)
            ]  # fmt: skip
            edits, refusals = score_edits(sequences, masked, self._penalty_counts, self._vocab_size, self.device)
        masks, broken = self._masks(indices, in_flight) if self._batch.has_grammars else (None, {})
        return SamplingInputs(
            sequences=self._batch.sequences,
            rows=self._batch.rows_at(indices, self.device),
            edits=edits,
            logprobs=self._batch.logprobs,
            refusals=refusals | broken,
            masks=tuple(masks for masks in (masks, self._rules.allowed) if masks is not None),
        )

    def _follow(self, sequences: Sequence[SampledSequence]) -> None:
        if sequences != self._batch.sequences:  # by identity: steps of a decoding batch have the same ones
            self._batch = batch_parameters(sequences, self.device)
            self._penalty_counts.keep_only(sequences)
            self._rules.keep_only(self._batch.sequences)
            if self._grammars is not None:
                self._grammars.keep_only(sequences)

    def launch(self, logits: Tensor, inputs: SamplingInputs) -> SampledTokens:
        """`logits` [N, V] in the order of the prepared sequences; not modified."""
        assert logits.shape == (len(inputs.sequences), self._vocab_size)
        scores = inputs.edits.applied_to(logits) if inputs.edits else logits
        for masks in inputs.masks:
            scores = scores.clone() if scores is logits else scores
            apply_token_bitmask(scores, masks.rows, masks.masks)
        token_ids, best = sample_tokens(scores, inputs.rows)
        logprobs = launch_logprobs(logits, token_ids, inputs.logprobs) if inputs.logprobs else None
        self._last_tokens = SampledTokens(inputs, token_ids, best, logprobs)
        return self._last_tokens

    def _masks(self, indices: list[int], in_flight: TokensInFlight) -> tuple[TokenMasks | None, dict[str, str]]:
        sequences = self._batch.sequences
        if self._grammars is None:
            problem = "this worker has no llguidance to follow a grammar"
            return None, {sequence.request_id: problem for sequence in sequences if sequence.sampling.grammar}
        return self._grammars.of(sequences, indices, in_flight)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _failure_message(best_score: float) -> str:
    if best_score == -math.inf:
        return "no token can be sampled: every one is masked"
    return f"the model's logits are not finite ({best_score})"
