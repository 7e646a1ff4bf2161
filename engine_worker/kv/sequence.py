"""One sequence of a request: its token ids, its blocks, and how far its KV is computed.

    prompt_token_ids                 output_token_ids (a resumed request starts with the journal's tokens here)
    |-------------------------------|--------------------|
    |<-- num_computed_tokens -->|<- to be computed --------->|    num_tokens = both lists, and
                                                         |???|    num_inflight_tokens: sampled, but not on the host yet

A sequence has no prefill or decode state: each step computes some more tokens, and a step that reaches the end samples
the next one. Both counts change when a step is scheduled; the token arrives when the step is applied, one step later if
the engine runs ahead. Preemption by recompute resets num_computed_tokens to 0; swapping keeps it. A sequence with a
cached prefix starts with num_computed_tokens > 0.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine_worker.kv.sequence_kv import SequenceKV
from shared.messages import FinishReason, Pooling, SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # never scheduled, or preempted by recompute: holds no blocks
    SWAPPED = "swapped"  # preempted; its KV is in the blocks of its host block table
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # The ids that end this sequence: sampling.stop_token_ids, and the model's end-of-sequence ids unless ignore_eos.
    # The sampler masks these ids until sampling.min_tokens tokens are generated.
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)
    sequence_index: int = 0  # the index of its choice in the answer
    beam_score: float = 0.0  # of a beam: the sum of its tokens' logprobs
    status: SequenceStatus = SequenceStatus.WAITING
    kv: SequenceKV = field(default_factory=SequenceKV)
    pooling: Pooling | None = None  # not None: the hidden state behind its first output token is reported with it
    # Of steps that still run: their sample, and the drafts before it, at most. Wrong drafts leave fewer.
    num_inflight_tokens: int = 0
    num_spare_tokens: int = 0  # that its blocks may have room for beside its tokens, because drafts may be wrong
    num_preemptions: int = 0
    num_tokens_when_preempted: int = 0
    num_dropped_tokens: int = 0  # computed tokens that a preemption by recompute dropped
    num_cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    num_scored_tokens: int = 0  # prompt tokens whose logprobs were reported, if the request asks for them

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_logprobs_of_prompt_token(self) -> int:
        """Logprobs per prompt token: its own and those of the most likely tokens; 0: none requested."""
        count = self.sampling.prompt_logprobs
        return 0 if count is None else 1 + count

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens whose ids are known."""
        return len(self.output_token_ids)

    @property
    def needs_last_token_on_host(self) -> bool:
        """Whether the host must see the last token before the next can be sampled, so no step can run ahead."""
        return self.sampling.use_beam_search

    @property
    def num_beam_candidates(self) -> int:
        """The candidates that let `beam_width` beams continue even if the best tokens of each are stop tokens."""
        return max(2, 1 + len(self.stop_token_ids)) * self.sampling.beam_width

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def is_pinned(self) -> bool:
        """Whether it was preempted more than once and got no token since; others yield first, so it progresses."""
        return self.num_preemptions > 1 and self.num_tokens <= self.num_tokens_when_preempted

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens whose ids the host has. Only their blocks can be hashed."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_reusable_tokens(self) -> int:
        """The tokens that need not be computed if their KV is cached: all but the last, which gives the logits.

        A preempted beam leaves two: it computes up to its last token first, then samples with the other beams.
        """
        is_beam = self.sampling.use_beam_search and len(self.output_token_ids) > 0
        reusable = self.num_known_tokens - (2 if is_beam else 1)
        if self.sampling.prompt_logprobs is None:
            return reusable
        return min(reusable, max(0, self.num_scored_tokens - 1))  # a token's logprob needs the previous token's logits

    @property
    def num_uncomputed_tokens(self) -> int:
        """The tokens without KV, including one in flight, which its step samples without computing its KV."""
        return self.num_tokens - self.kv.num_computed_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the token ids of positions [start, end) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


@dataclass(slots=True, frozen=True)
class BeamCandidate:
    """A beam continued by one token. `beam` is its position among the request's beams in the batch."""

    beam: int
    token_id: int
    score: float  # sum of the logprobs of all output tokens, including this one


def finish_reason(sequence: Sequence, max_num_tokens: int) -> FinishReason | None:
    """Return why `sequence` ends with its current output, or None. `max_num_tokens`: its maximum length.

    The stop token is part of the output, so that a new owner can see in the journal that the request is complete.
    """
    output, sampling = sequence.output_token_ids, sequence.sampling
    num_output = len(output)
    if num_output == 0:
        return None
    if output[-1] in sequence.stop_token_ids and num_output >= sampling.min_tokens:
        return FinishReason.STOP
    if num_output >= sampling.max_tokens or num_output + len(sequence.prompt_token_ids) >= max_num_tokens:
        return FinishReason.LENGTH
    return None


def ends_with_inflight_token(sequence: Sequence, max_num_tokens: int) -> bool:
    """Return whether tokens in flight may end the sequence by length, so that nothing may be left to compute."""
    num_inflight = sequence.num_inflight_tokens
    num_output = len(sequence.output_token_ids) + num_inflight
    return num_inflight > 0 and (
        num_output >= sequence.sampling.max_tokens or len(sequence.prompt_token_ids) + num_output >= max_num_tokens
    )
