"""The data between the scheduler and an executor: a batch to compute, and its result.

`schedule()` returns a ScheduledBatch that names every token to compute and every block to copy. An executor carries it
out in this order: swap-out, swap-in, copies, forward pass, sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from engine_worker.kv.sequence import BeamCandidate as BeamCandidate  # noqa: PLC0414 - part of StepResult
from engine_worker.kv.sequence import Sequence as Sequence  # noqa: PLC0414 - as above
from engine_worker.kv.sequence_kv import SequenceKV, Table
from engine_worker.kv.transfers import Transfers, TransferTime
from engine_worker.scheduling.sequence_group import SequenceGroup
from shared.messages import EncodedLogprobs, FinishReason, PromptLogprobs, SamplingParams


@dataclass(slots=True)  # not frozen: one per token is created, and frozen takes three times as long
class ScheduledSequence:
    """Compute positions [start, end) of `sequence`; sample after the last one if `samples`.

    The token at end - 1 may be in flight: the previous step samples it on the device, and the host does not have it
    yet. Then it is the only token of its row, and the sequence was in the previous batch.

    An entry without new tokens is a fork that samples its first token, from the logits of the entry before it that has
    tokens.

    With drafts, the last tokens are guesses of the next ones: each of them, and the token before, is sampled after, and
    the guesses that equal their samples are kept. Draft number j is -j while only the device has it, because the
    previous step made it. Then that step may have kept fewer of its drafts than planned, and `start` is an upper bound:
    the device lowers the positions of the row.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool  # the step reaches the end of the sequence, so its last logits give the next token
    drafts: tuple[int, ...] = ()  # the last of the new tokens; none of them is in the sequence yet
    num_pending: int = 0  # tokens before `start` that the recurrent state does not contain yet

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def num_samples(self) -> int:
        """Tokens that the step samples: one after each draft, and one before them."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def has_unknown_drafts(self) -> bool:
        """Whether only the device has the drafts."""
        return bool(self.drafts) and self.drafts[0] < 0

    @property
    def output_index(self) -> int:
        """The output index of the first token that this step samples; its draw depends only on (seed, index)."""
        return self.end - len(self.drafts) - len(self.sequence.prompt_token_ids)

    @property
    def scored_tokens(self) -> range:
        """The indices of prompt tokens whose logprobs this step computes: each follows a computed position."""
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(self.start + 1, sequence.num_scored_tokens), min(self.end + 1, sequence.num_prompt_tokens))


@dataclass(slots=True, frozen=True)
class ScheduledBatch:
    sequences: list[ScheduledSequence]
    transfers: Transfers = field(default_factory=Transfers)
    num_drafts_to_make: int = 0  # for each sequence at the end of the step, by a draft head or from its grammar

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute and nothing to move."""
        return not (self.sequences or self.transfers)

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_new_tokens for scheduled in self.sequences)


PromptScore: TypeAlias = tuple[Sequence, PromptLogprobs]


@dataclass(slots=True, frozen=True)
class StepResult:
    """The result of a batch.

    `sampled_token_ids[i]` belongs to `batch.sequences[i]`: the drafts that were right, then one more token; None if
    that sequence did not sample, or failed. `logprobs` likewise; None also if the sequence requests none, and empty if
    no sequence of the batch does.
    """

    sampled_token_ids: list[list[int] | None]
    failures: dict[str, str] = field(default_factory=dict)  # request id -> error; ends only that request
    phase_seconds: dict[str, float] = field(default_factory=dict)  # prepare, forward, sample
    logprobs: list[list[EncodedLogprobs] | None] = field(default_factory=list)
    transfer_times: list[TransferTime] = field(default_factory=list)  # of this or earlier batches, once they end
    # By request id, best first: sequence.num_beam_candidates for each beam search that sampled.
    beam_candidates: dict[str, list[BeamCandidate]] = field(default_factory=dict)
    prompt_logprobs: list[PromptScore] = field(default_factory=list)
    drafts: Mapping[Sequence, list[int]] = field(default_factory=dict)  # of the next step: a head's, or forced ones


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """The handle of a step that was computed during submit()."""

    result: StepResult

    def collect(self) -> StepResult:
        return self.result


@dataclass(slots=True)  # not frozen: one per token is created, and frozen takes three times as long
class SequenceUpdate:
    """The outcome of one step for one sequence, which has ended if `finish_reason` or `error` is set.

    A beam search gives updates without tokens until its end, then one per answer with all its tokens.
    """

    sequence: Sequence
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    new_logprobs: list[EncodedLogprobs] | None = None  # one per token, if the request asks for them
    ended_group: SequenceGroup | None = None  # set if this update completes the whole request

    @property
    def index(self) -> int:
        """The output index of the first new token. A beam search has no output before its end."""
        if self.sequence.sampling.use_beam_search:
            return 0
        return self.sequence.num_output_tokens - len(self.new_token_ids)


GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def synthetic_batch(
    num_sequences: int,
    start: int,
    num_new_tokens: int,
    block_size: int,
    sampling: SamplingParams = GREEDY,
    *,
    num_groups: int = 1,
) -> ScheduledBatch:
    """Return a batch for warmup and measurements, whose sequences all share the first blocks of the pool.

    Args:
        num_sequences: The number of sequences.
        start: Computed tokens per sequence.
        num_new_tokens: Tokens to compute per sequence.
        block_size: Tokens per block.
        sampling: Of all sequences; default: greedy.
        num_groups: Groups of layers, which also share these blocks.
    """
    num_tokens = start + num_new_tokens
    blocks = list(range(1, -(-num_tokens // block_size) + 1))
    tables = (Table(blocks),) * num_groups
    sequences = [Sequence("warmup", [0] * num_tokens, sampling, kv=SequenceKV(tables)) for _ in range(num_sequences)]
    return ScheduledBatch([ScheduledSequence(one, start, num_new_tokens, samples=True) for one in sequences])
