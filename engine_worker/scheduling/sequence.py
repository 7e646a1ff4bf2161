"""A request inside the engine: its token ids, its blocks, and how far its KV is computed.

    prompt_token_ids                 output_token_ids (a resumed request starts with the journal's tokens here)
    |-------------------------------|--------------------|
    |<-- num_computed_tokens -->|<- to be computed --------->|    num_tokens = both lists, and
                                                         |???|    num_inflight_tokens: sampled, but not known here yet

A sequence is never "in prefill" or "in decode": each step computes some tokens more, and a step that reaches the end
samples the next one. Both counts move when a step is scheduled; the token itself comes when the step is applied, one
step later if the engine runs ahead. A sequence preempted by recompute has num_computed_tokens = 0 again, one that is
swapped keeps its count; they are otherwise unchanged. One whose prefix is in the cache starts with num_computed_tokens
> 0. Every walk in the worker ends or begins at one. It knows no other sequence, no store and no device.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine_worker.kv.sequence_kv import SequenceKV
from shared.messages import FinishReason, SamplingParams


class SequenceStatus(StrEnum):
    WAITING = "waiting"  # never scheduled, or preempted by recompute: holds no blocks
    SWAPPED = "swapped"  # preempted: waits, and its KV is in the blocks of its host block table
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # Every id that ends this sequence: sampling.stop_token_ids, and the model's end-of-sequence ids unless ignore_eos.
    # The sampler masks exactly these while fewer than sampling.min_tokens tokens are out.
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)
    sequence_index: int = 0  # the index of its choice in the answer
    beam_score: float = 0.0  # of a beam: the sum of its tokens' log-probabilities
    status: SequenceStatus = SequenceStatus.WAITING
    kv: SequenceKV = field(default_factory=SequenceKV)
    num_inflight_tokens: int = 0  # of steps that still run: 0 or 1 between two calls of the scheduler
    num_preemptions: int = 0
    num_tokens_when_preempted: int = 0
    num_dropped_tokens: int = 0  # that had been computed when it was preempted by recompute
    num_cached_tokens: int = 0  # of the prompt: found in the cache when it was first admitted
    num_scored_tokens: int = 0  # of the prompt: their log-probabilities are out, if the request asks for them

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_logprobs_of_prompt_token(self) -> int:
        """Its own and those of the likeliest; 0: the request asks for none."""
        count = self.sampling.prompt_logprobs
        return 0 if count is None else 1 + count

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens whose ids are known."""
        return len(self.output_token_ids)

    @property
    def needs_last_token_on_host(self) -> bool:
        """Its next token cannot be sampled before the host has seen the last one: no step ahead for it."""
        return self.sampling.use_beam_search

    @property
    def num_beam_candidates(self) -> int:
        """As many candidates as let a full width of beams go on even if each beam's best tokens all stop it."""
        return max(2, 1 + len(self.stop_token_ids)) * self.sampling.beam_width

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def is_pinned(self) -> bool:
        """Preempted more than once and no token further since it came back: others yield before it, so it moves on."""
        return self.num_preemptions > 1 and self.num_tokens <= self.num_tokens_when_preempted

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids are final: a block's content can be named only by them."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_reusable_tokens(self) -> int:
        """The tokens that need not be computed if a cache has their KV: the last must be, as it gives the logits.

        A beam that was preempted leaves one more: it computes up to its last token first, and samples with the others.
        """
        is_beam = self.sampling.use_beam_search and len(self.output_token_ids) > 0
        reusable = self.num_known_tokens - (2 if is_beam else 1)
        if self.sampling.prompt_logprobs is None:
            return reusable
        return min(reusable, max(0, self.num_scored_tokens - 1))  # a token is scored by computing the one before it

    @property
    def num_uncomputed_tokens(self) -> int:
        """A token in flight is among them: its step has sampled it and not computed its KV."""
        return self.num_tokens - self.kv.num_computed_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions [start, end) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


@dataclass(slots=True, frozen=True)
class BeamCandidate:
    """Beam `beam` of a request, as they stand side by side in a batch, continued by one token."""

    beam: int
    token_id: int
    score: float  # sum of the log-probabilities of all output tokens, this one's included


def finish_reason(sequence: Sequence, max_num_tokens: int) -> FinishReason | None:
    """Why `sequence` ends with the output it has now, or None. `max_num_tokens`: the longest a sequence can get here.

    The stop token itself is part of the output: the journal must show the next owner that the request was complete.
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
    """Whether the token in flight is the last by length, whatever it is: nothing more is to be computed."""
    num_inflight = sequence.num_inflight_tokens
    return num_inflight > 0 and (
        sequence.num_output_tokens + num_inflight >= sequence.sampling.max_tokens
        or sequence.num_tokens >= max_num_tokens
    )
