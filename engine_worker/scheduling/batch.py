"""The scheduler's decision and the executor's answer: the seam between thinking and doing.

`schedule()` returns a ScheduledBatch that names every token to compute and every block to copy; an executor carries it
out in this order: swap-out, swap-in, copies, forward pass, sampling. Nothing here knows of tensors. It is used in every
step: a block's walk leaves the scheduler in a batch, a token's way back begins with its answer.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from engine_worker.kv.sequence_kv import SequenceKV
from engine_worker.scheduling.sequence import BeamCandidate as BeamCandidate  # noqa: PLC0414 - in a step's answer
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.sequence_group import SequenceGroup
from shared.messages import EncodedLogprobs, FinishReason, PromptLogprobs, SamplingParams


@dataclass(slots=True)  # not frozen, which takes three times as long: one is made for each token
class ScheduledSequence:
    """Compute positions [start, end) of `sequence`; sample after the last one if `samples`.

    The token at end - 1 may be in flight: the step before samples it on the device, and the host does not know it yet.
    It is the only token of its row then, and the sequence was in the batch before this one.

    Without new tokens it is a fork that samples its first token: of the same logits as the entry with tokens before it.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    samples: bool  # the step reaches the end of the sequence, so its last logits choose the next token

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def output_index(self) -> int:
        """Index of the token that this step samples: its randomness depends on (seed, index) alone."""
        return self.end - len(self.sequence.prompt_token_ids)

    @property
    def scored_tokens(self) -> range:
        """Indices of the prompt's tokens whose log-probabilities this step gives: each follows a computed position."""
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(self.start + 1, sequence.num_scored_tokens), min(self.end + 1, sequence.num_prompt_tokens))


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """All layers of one block: on the device for copy-on-write; from device to host, or back, for swaps."""

    source_block_id: int
    target_block_id: int


@dataclass(slots=True)
class Transfers:
    """Blocks to move in one batch, before it computes anything."""

    block_copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    batch_number: int = 0


@dataclass(slots=True, frozen=True)
class TransferTime:
    """How long the transfers of one batch took on the device's own streams."""

    batch_number: int
    swap_out_seconds: float = 0.0
    swap_in_seconds: float = 0.0


@dataclass(slots=True, frozen=True)
class ScheduledBatch:
    sequences: list[ScheduledSequence]
    block_copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)  # device block id -> host block id
    swap_in: list[BlockCopy] = field(default_factory=list)  # host block id -> device block id; for the next step
    number: int = 0  # counts batches; names their transfers in events

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to move."""
        return not (self.sequences or self.block_copies or self.swap_out or self.swap_in)

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_new_tokens for scheduled in self.sequences)

    @property
    def transfers(self) -> Transfers:
        return Transfers(self.block_copies, self.swap_out, self.swap_in, self.number)


PromptScore: TypeAlias = tuple[Sequence, PromptLogprobs]  # whose, and from which of its prompt's tokens on


@dataclass(slots=True, frozen=True)
class StepResult:
    """`sampled_token_ids[i]` belongs to `batch.sequences[i]`; None where that sequence did not sample, or failed.

    `logprobs` likewise, None also where the sequence did not ask; empty when no sequence of the batch did.
    """

    sampled_token_ids: list[int | None]
    failures: dict[str, str] = field(default_factory=dict)  # request id -> why it failed; ends only that request
    phase_seconds: dict[str, float] = field(default_factory=dict)  # prepare, forward, sample: the executor's own split
    logprobs: list[EncodedLogprobs | None] = field(default_factory=list)
    transfer_times: list[TransferTime] = field(default_factory=list)  # of this batch or earlier ones, when they end
    # By request id, best first: sequence.num_beam_candidates of them for each beam search that sampled.
    beam_candidates: dict[str, list[BeamCandidate]] = field(default_factory=dict)
    prompt_logprobs: list[PromptScore] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """The handle of a step that was computed when it was submitted."""

    result: StepResult

    def collect(self) -> StepResult:
        return self.result


@dataclass(slots=True)  # not frozen, which takes three times as long: one is made for each token
class SequenceUpdate:
    """The outcome of one step for one sequence, which has ended if there is a `finish_reason` or an `error`.

    A beam search gives updates without tokens until it is over; then one for each answer, with all its tokens.
    """

    sequence: Sequence
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    new_logprobs: list[EncodedLogprobs] | None = None  # one a token, if the request asks for them
    ended_group: SequenceGroup | None = None  # set if the whole request is complete with this update

    @property
    def index(self) -> int:
        """The index of the first new token in the output. A beam search has no output before its end."""
        if self.sequence.sampling.use_beam_search:
            return 0
        return self.sequence.num_output_tokens - len(self.new_token_ids)


_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def synthetic_batch(
    num_sequences: int,
    start: int,
    num_new_tokens: int,
    block_size: int,
    sampling: SamplingParams = _GREEDY,
) -> ScheduledBatch:
    """A step that nobody asked for, of sequences that all share the first blocks of the pool. Greedy by default."""
    num_tokens = start + num_new_tokens
    block_table = list(range(1, -(-num_tokens // block_size) + 1))
    made_up = [
        Sequence("warmup", [0] * num_tokens, sampling, kv=SequenceKV(block_table=block_table))
        for _ in range(num_sequences)
    ]
    return ScheduledBatch([ScheduledSequence(one, start, num_new_tokens, samples=True) for one in made_up])
