"""Execute one ScheduledBatch: block moves, forward pass, and sampling. Implements engine.BatchExecutor.

submit() enqueues all work without a wait for a CUDA device; collect() waits for the result. A small batch runs as a
CUDA graph if one of its size was captured. Only this class drives a replica.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_worker.execution.group_health import Group
from engine_worker.execution.sampling.beam_candidates import DeviceCandidates, launch_beam_candidates
from engine_worker.execution.sampling.draft_rows import ForcedTokens, forced_drafts, kept_rows, sampled_rows
from engine_worker.execution.sampling.pooling import PooledVectors
from engine_worker.execution.sampling.prompt_scores import PromptScores
from engine_worker.execution.sampling.sampled_sequence import SampledSequence
from engine_worker.execution.sampling.sampler import SampledTokens, Sampler, Samples
from engine_worker.execution.step.describe import NO_LOOKAHEAD, StepDescriber
from engine_worker.execution.step.draft_maker import PendingDrafts
from engine_worker.execution.step.replica import PreparedStep, StepReplica
from engine_worker.model.model_input import ModelInput
from engine_worker.model.served_model import StepOutput
from engine_worker.model.spec import ModelShape
from engine_worker.scheduling.batch import GREEDY, FinishedStep, ScheduledBatch, StepResult, synthetic_batch
from shared.messages import EncodedLogprobs, Grammar, SamplingParams, encoded_logprobs

if TYPE_CHECKING:
    from engine_worker.execution.step.draft_maker import DraftMaker


@dataclass(slots=True)
class SubmittedStep:
    """A step that was submitted and not collected."""

    batch: ScheduledBatch
    tokens: SampledTokens | None  # None: the step samples nothing
    beams: DeviceCandidates | None
    scores: PromptScores | None
    vectors: PooledVectors | None
    ended: torch.cuda.Event | None  # of a step on CUDA that samples nothing
    replica: StepReplica
    forced_tokens: ForcedTokens
    phase_seconds: dict[str, float]
    drafts: PendingDrafts | None
    last_drafts: PendingDrafts | None  # those of the step before

    def collect(self) -> StepResult:
        started = time.perf_counter()
        if self.ended is not None:
            self.ended.synchronize()
        samples = self.tokens.collect() if self.tokens is not None else Samples([])
        self._learn_drafts()
        kept = kept_rows(self.batch.sequences, samples.token_ids)
        sampled = [_whole(samples.token_ids[rows]) if rows is not None else None for rows in kept]
        made = dict(self.drafts.by_sequence) if self.drafts is not None else {}
        return StepResult(
            sampled_token_ids=sampled,
            failures=self._failures(samples, kept) if samples.failures else {},
            beam_candidates=self.beams.collect() if self.beams is not None else {},
            logprobs=self._reports(samples, kept) if samples.logprobs or self.vectors is not None else [],
            prompt_logprobs=self.scores.collect() if self.scores is not None else [],
            # On CUDA the other two times are those of enqueueing, and this one contains the host's whole wait.
            phase_seconds=self.phase_seconds | {"sample": self.phase_seconds["sample"] + time.perf_counter() - started},
            transfer_times=self.replica.finished_transfers(),
            drafts=made | forced_drafts(self.batch, sampled, self.forced_tokens),
        )

    def _learn_drafts(self) -> None:
        """Name the drafts that only the device had, because the step before made them."""
        for scheduled in self.batch.sequences:
            if scheduled.has_unknown_drafts:
                assert self.last_drafts is not None, "the step before made no drafts"
                scheduled.drafts = tuple(self.last_drafts.by_sequence[scheduled.sequence][: len(scheduled.drafts)])

    def _failures(self, samples: Samples, kept: list[slice | None]) -> dict[str, str]:
        """Return the failures by request; a row after a wrong draft may fail without harm."""
        failures = {}
        for scheduled, rows in zip(self.batch.sequences, kept, strict=True):
            for row in range(rows.start, rows.stop) if rows is not None else ():
                if (message := samples.failures.get(row)) is not None:
                    failures[scheduled.sequence.request_id] = message
        return failures

    def _reports(self, samples: Samples, kept: list[slice | None]) -> list[list[EncodedLogprobs] | None]:
        """Return one entry for each sequence of the batch: the logprobs of its tokens, or its vector."""
        vectors = self.vectors.collect() if self.vectors is not None else {}
        reports: list[list[EncodedLogprobs] | None] = []
        for scheduled, rows in zip(self.batch.sequences, kept, strict=True):
            logprobs = samples.logprobs[rows] if rows is not None else []
            encoded = [encoded_logprobs(one) for one in logprobs if one is not None]
            if (vector := vectors.get(scheduled.sequence)) is not None:
                encoded = [vector]
            reports.append(encoded or None)
        return reports


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds:
    device_to_host_bytes_per_second: float
    host_to_device_bytes_per_second: float
    prefill_tokens_per_second: float


class ModelRunner:
    def __init__(
        self,
        replica: StepReplica,
        sampler: Sampler,
        weights_bytes: int = 0,
        draft_maker: "DraftMaker | None" = None,
        num_drafts: int = 0,
    ) -> None:
        """Run batches on `replica`.

        Args:
            replica: The model.
            sampler: For its logits.
            weights_bytes: Of the model.
            draft_maker: Makes drafts after each step, if the device does.
            num_drafts: The most drafts of a sequence and step.
        """
        kv_cache, self.draft_maker = replica.kv_cache, draft_maker
        self._last_drafts: PendingDrafts | None = None
        self.model_spec: ModelShape = replica.model_spec
        self.device_type = replica.device_type
        self.dtype_name = replica.dtype_name
        self.weights_bytes = weights_bytes
        self.quantization = "none"  # of the linear layers; set by the loader
        self.kv_cache_bytes: int = kv_cache.nbytes
        self.kv_cache_dtype = kv_cache.layout.dtype  # of keys and values
        self.block_bytes = kv_cache.layout.block_bytes
        self.windows = [group.window for group in kv_cache.layout.groups]  # in tokens; 0: none
        self.num_blocks = kv_cache.num_blocks  # including block 0, which is never allocated
        self.num_host_blocks = kv_cache.num_host_blocks  # 0: no host pool
        self.speeds: MeasuredSpeeds | None = None  # set by the loader if there is a host pool
        self.group: Group | None = None  # set by the loader if there are other ranks
        self.compile_grammar: Callable[[Grammar], object] | None = None  # needs llguidance; thread-safe
        self.block_size = kv_cache.block_size
        self.max_model_len = replica.max_model_len
        self.replica = replica
        self._sampler = sampler
        self.num_host_state_blocks = kv_cache.num_host_state_blocks
        self.state_bytes = kv_cache.layout.state_bytes
        self.num_state_blocks = kv_cache.num_state_blocks  # including block 0; 0: the model has no recurrent layers
        self._describer = StepDescriber(
            kv_cache.block_size,
            len(self.windows),
            decodes_first=self.device_type == "cpu",
            has_states=self.num_state_blocks > 0,
            num_drafts=num_drafts,
            lookahead=draft_maker.lookahead if draft_maker is not None else NO_LOOKAHEAD,
        )

    def synthetic_batch(
        self, num_sequences: int, start: int, num_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> ScheduledBatch:
        """Return a batch for warmup and measurements; see batch.synthetic_batch()."""
        num_groups = len(self.windows)
        return synthetic_batch(num_sequences, start, num_new_tokens, self.block_size, sampling, num_groups=num_groups)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.submit(batch).collect()

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> SubmittedStep | FinishedStep:
        started = time.perf_counter()
        if not batch.sequences:  # all runnable sequences wait for blocks from the host
            self.replica.move_blocks(batch.transfers)
            return FinishedStep(StepResult([], transfer_times=self.replica.finished_transfers()))
        scores, vectors = self._prompt_scores(batch), self._vectors(batch)
        description = self._describer.describe(batch)
        looks, pooled = scores.looks if scores is not None else (), vectors.rows if vectors is not None else ()
        step = self.replica.prepare(description, looks, pooled)
        rows, indices = sampled_rows(batch.sequences)
        if rows:
            self._sampler.begin(rows, indices)
        prepared = time.perf_counter()
        logits = self.replica.run(step, _look(scores, vectors))
        forwarded = time.perf_counter()
        beams = _launch_beams(batch, logits)  # before the tokens, whose copy to the host shows that these are complete
        tokens = self._launch_sampling(logits, rows, indices, step.model_input) if rows else None
        phase_seconds = {
            "prepare": prepared - started,
            "forward": forwarded - prepared,
            "sample": time.perf_counter() - forwarded,
        }
        ended = _recorded_event() if tokens is None and logits.is_cuda else None
        last, self._last_drafts = self._last_drafts, self._launch_drafts(batch, step, tokens)
        return SubmittedStep(
            batch,
            tokens,
            beams,
            scores,
            vectors,
            ended,
            self.replica,
            self._sampler.forced_tokens,
            phase_seconds,
            self._last_drafts,
            last,
        )

    def _launch_drafts(
        self, batch: ScheduledBatch, step: PreparedStep, tokens: SampledTokens | None
    ) -> PendingDrafts | None:
        if self.draft_maker is None:
            return None
        if not (self.draft_maker.follows_all_steps or batch.num_drafts_to_make or _has_drafts(batch)):
            self._describer.without_drafts()
            return None
        sampled = tokens.token_ids if tokens is not None else torch.zeros(0, dtype=torch.int64)
        description = self._describer.describe_drafts(batch)
        drafts = self.draft_maker.launch(step.model_input, step.graph, sampled, description, batch.num_drafts_to_make)
        return PendingDrafts(drafts, description.drafting) if drafts is not None else None

    def _prompt_scores(self, batch: ScheduledBatch) -> PromptScores | None:
        # The filter saves 40 us of a step of 256 sequences.
        asking = (s for s in batch.sequences if s.sequence.sampling.prompt_logprobs is not None)
        if not any(scheduled.scored_tokens for scheduled in asking):
            return None
        return PromptScores(self._describer.rows_of(batch), self._sampler.device)

    def _vectors(self, batch: ScheduledBatch) -> PooledVectors | None:
        if not any(scheduled.sequence.pooling is not None and scheduled.samples for scheduled in batch.sequences):
            return None
        return PooledVectors(self._describer.rows_of(batch), self._sampler.device)

    def _launch_sampling(
        self, logits: Tensor, rows: Sequence[SampledSequence], indices: list[int], step: ModelInput
    ) -> SampledTokens:
        inputs = self._sampler.prepare(rows, indices)
        if step.lowered is not None:
            inputs = inputs.lowered_by(step.lowered[step.logits_indices[: len(rows)]])
        tokens = self._sampler.launch(logits, inputs)
        # A failed sequence may already be in the next batch; its results there are dropped.
        self._describer.keep_samples(rows)
        self.replica.keep_samples(tokens.token_ids)
        return tokens


def _has_drafts(batch: ScheduledBatch) -> bool:
    return any(scheduled.drafts for scheduled in batch.sequences)


def _whole(token_ids: list[int | None]) -> list[int] | None:
    """Return the tokens of a sequence, None if one of its rows failed."""
    known = [token_id for token_id in token_ids if token_id is not None]
    return known if len(known) == len(token_ids) else None


def _look(scores: PromptScores | None, vectors: PooledVectors | None) -> Callable[[StepOutput], None] | None:
    """Return the function that reads the output of a step beside its logits."""
    launches = [wanted.launch for wanted in (scores, vectors) if wanted is not None]
    if len(launches) <= 1:
        return launches[0] if launches else None

    def look(output: StepOutput) -> None:
        for launch in launches:
            launch(output)

    return look


def _launch_beams(batch: ScheduledBatch, logits: Tensor) -> DeviceCandidates | None:
    sampling = [scheduled.sequence for scheduled in batch.sequences if scheduled.samples]
    if not any(sequence.sampling.use_beam_search for sequence in sampling):
        return None
    return launch_beam_candidates(logits, sampling)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
