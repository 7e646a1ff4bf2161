"""Which tokens are computed in the next step: schedule() decides, an executor computes, apply() takes in its samples.

    schedule() apply() schedule() apply() ...            one step at a time
    schedule() schedule() apply() schedule() apply() ... one ahead: what a running step samples counts as a token

Results are applied in the order of scheduling, and at most one step is not applied when the next is scheduled.

One token budget a step; there is no prefill or decode phase: every sequence's computed tokens catch up with its tokens.

    1. running sequences that lack one token (they decode): always all of them, so no prompt ever delays a stream
    2. running sequences that lack more (prompts in chunks, oldest first), with what is left of the budget
    3. waiting sequences, in order, while seats, budget and blocks last

When a running sequence needs a block and none is free, the newest sequence is preempted: its KV goes to host memory, or
is dropped and computed again later. Nobody is admitted in the same step, and never into the last free blocks (see
_headroom_blocks). A sequence that is alone always fits, because none gets longer than `max_num_tokens`: so the oldest
moves on in every step, and no sequence waits for ever.

A sequence that ends while a step with it is running is out at once, and what that step samples for it is dropped. One
that is preempted then keeps its sample.

Knows nothing of events, requests' validity, time or devices. Used by one thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence, StepResult
from engine_worker.scheduling.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.kv_events import KVTotals
from engine_worker.scheduling.kv_view import kv_view
from engine_worker.scheduling.policy import FirstComeFirstServed
from engine_worker.scheduling.preemption import PreemptionMode
from engine_worker.scheduling.sequence import Sequence, SequenceStatus
from engine_worker.scheduling.stats import KVCacheStats
from engine_worker.scheduling.stop_conditions import ends_with_inflight_token, finish_reason
from shared.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Bounds the gap between two tokens of running streams: at most this many prompt tokens in a step that also decodes
    # (None: the rest of the budget). SmolLM2 on 2 CPU cores prefills ~1400 tok/s, so 256 is a gap of ~0.2 s.
    max_prefill_tokens_with_decodes: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs = {self.max_num_seqs}: "
                "a step could not decode every running sequence"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; a prompt and an output token need at least 2")
        cap = self.max_prefill_tokens_with_decodes
        if cap is not None and cap < 1:
            raise ValueError(f"max_prefill_tokens_with_decodes is {cap}; prompts would starve")


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step did to one sequence. It has ended if there is a `finish_reason` or an `error`."""

    sequence: Sequence
    new_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    new_logprobs: list[TokenLogprobs] | None = None  # one a token, if the request asks for them


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, policy: FirstComeFirstServed | None = None
    ) -> None:
        self.config = config
        self._kv_cache = kv_cache
        self._policy = policy or FirstComeFirstServed()
        self._running: dict[str, Sequence] = {}  # by request id, in order of admission
        self._waits_for = ""  # what the first of the queue lacked in the last step
        # The longest a sequence gets, prompt and output: the model's context, or the whole KV cache if smaller.
        self.max_num_tokens = min(config.max_model_len, kv_cache.capacity_tokens)

    @property
    def capacity_tokens(self) -> int:
        return self._kv_cache.capacity_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def num_swapped(self) -> int:
        """Of those that wait: with their KV in host memory."""
        return sum(sequence.status is SequenceStatus.SWAPPED for sequence in self._policy)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether a sequence is running whose next step can't be prepared before its last token is known."""
        return any(sequence.needs_last_token_on_host for sequence in self._running.values())

    @property
    def num_open_seats(self) -> int:
        """Sequences that could likely start in the next step: none while others wait, or blocks are short."""
        if self.num_waiting:
            return 0
        spare_blocks = self._kv_cache.num_available_blocks - self._headroom_blocks()
        return max(0, min(self.config.max_num_seqs - self.num_running, spare_blocks))

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence`, whose request id is not in use."""
        assert sequence.num_tokens < self.max_num_tokens, f"{sequence.request_id} could never be computed and sampled"
        self._policy.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a sequence wherever it is, and its blocks at once. Unknown ids are ignored."""
        sequence = self._running.get(request_id) or self._policy.remove(request_id)
        if sequence is not None:
            self._end(sequence)

    def schedule(self) -> ScheduledBatch:
        """What to compute next; from here on it counts as computed."""
        preempted = self._make_room()
        scheduled = [
            self._plan(sequence, 1)
            for sequence in self._running.values()
            if sequence.num_uncomputed_tokens == 1 and not ends_with_inflight_token(sequence, self.max_num_tokens)
        ]
        budget = self._prefill_budget(len(scheduled))
        prefills = self._prefills(may_admit=not preempted)
        self._waits_for = "blocks" if preempted else "its share of a step"
        while budget > 0 and (sequence := next(prefills, None)) is not None:
            num_new_tokens = min(budget, sequence.num_uncomputed_tokens)
            scheduled.append(self._plan(sequence, num_new_tokens))
            budget -= num_new_tokens
        transfers = self._kv_cache.take_transfers()
        return ScheduledBatch(
            scheduled,
            transfers.block_copies,
            preempted,
            transfers.swap_out,
            transfers.swap_in,
            transfers.batch_number,
        )

    def apply(self, batch: ScheduledBatch, result: StepResult) -> list[SequenceUpdate]:
        """One update for each sequence that got a token or ended; ended sequences have given up their blocks."""
        for time in result.transfer_times:
            self._kv_cache.events.measured(time.batch_number, time.swap_out_seconds, time.swap_in_seconds)
        updates = []
        logprobs = result.logprobs or [None] * len(batch.sequences)
        sampled = zip(batch.sequences, result.sampled_token_ids, logprobs, strict=True)
        for scheduled, token_id, token_logprobs in sampled:
            sequence = scheduled.sequence
            sequence.num_inflight_tokens -= scheduled.samples
            if sequence.status is SequenceStatus.FINISHED:
                continue  # it ended after it was scheduled
            error = result.failures.get(sequence.request_id)
            if error is not None or scheduled.samples:
                updates.append(self._update(sequence, token_id, token_logprobs, error))
        return updates

    def kv_cache_stats(self) -> KVCacheStats:
        return self._kv_cache.stats(self._running.values())

    def kv_view(self) -> dict[str, Any]:
        sequences = [*self._running.values(), *self._policy]
        return kv_view(self._kv_cache, sequences, self._waits_for if self.num_waiting else "")

    def kv_events(self, since: int) -> dict[str, Any]:
        """Those after the number `since`."""
        return self._kv_cache.events.since(since)

    @property
    def kv_totals(self) -> KVTotals:
        return self._kv_cache.events.totals

    def check_integrity(self) -> None:
        """Raise AssertionError unless block tables, pool and statuses agree. Between steps only."""
        self._kv_cache.check_integrity([*self._running.values(), *self._policy])
        for sequence in self._policy:
            assert bool(sequence.host_block_table) == (sequence.status is SequenceStatus.SWAPPED), sequence.request_id
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self._running.values())
        assert all(0 <= sequence.num_inflight_tokens <= 1 for sequence in self._running.values())
        assert self.num_running <= self.config.max_num_seqs

    def _make_room(self) -> list[Sequence]:
        """A block for every running sequence that crossed into a new one, oldest first; returns the preempted."""
        preempted: list[Sequence] = []
        for sequence in list(self._running.values()):
            if (
                self._kv_cache.num_missing_blocks(sequence) > 0
                and sequence.status is SequenceStatus.RUNNING
                and not ends_with_inflight_token(sequence, self.max_num_tokens)
            ):
                preempted += self._make_room_for(sequence)
        return preempted

    def _make_room_for(self, sequence: Sequence) -> list[Sequence]:
        preempted: list[Sequence] = []
        while not self._kv_cache.can_allocate(sequence):
            victim = self._policy.choose_victim(self._running, sequence)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return preempted
        self._kv_cache.allocate(sequence)
        return preempted

    def _plan(self, sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
        start, samples = sequence.num_computed_tokens, num_new_tokens == sequence.num_uncomputed_tokens
        self._kv_cache.publish(sequence, start + num_new_tokens)
        sequence.num_computed_tokens += num_new_tokens
        sequence.num_inflight_tokens += samples
        return ScheduledSequence(sequence, start, num_new_tokens, samples)

    def _prefill_budget(self, num_decodes: int) -> int:
        budget = self.config.max_num_batched_tokens - num_decodes
        cap = self.config.max_prefill_tokens_with_decodes
        return budget if cap is None or num_decodes == 0 else min(budget, cap)

    def _prefills(self, may_admit: bool) -> Iterator[Sequence]:
        """Running sequences that lack more than one token, then new ones, each admitted when it is asked for.

        One whose KV comes from the host is admitted now and takes part in the next step, so that the copy and this step
        run at the same time.
        """
        yield from [sequence for sequence in self._running.values() if sequence.num_uncomputed_tokens > 1]
        while may_admit and (sequence := self._admit()) is not None:
            if not self._kv_cache.is_arriving(sequence):
                yield sequence

    def _admit(self) -> Sequence | None:
        sequence = self._policy.first()
        if sequence is None:
            return None
        self._waits_for = self._obstacle(sequence)
        if self._waits_for:
            return None
        self._policy.pop_first()
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence.request_id] = sequence
        return sequence

    def _obstacle(self, sequence: Sequence) -> str:
        """Why `sequence` is not admitted; "" if there is nothing, and it has its blocks now."""
        if self.num_running == self.config.max_num_seqs:
            return "a seat"
        if sequence.num_inflight_tokens:  # preempted just now; its token comes before the next step is scheduled
            return "its token in flight"
        return "" if self._kv_cache.try_admit(sequence, self._headroom_blocks()) else "blocks"

    def _headroom_blocks(self) -> int:
        """Blocks an admission leaves free: one for each sequence, so that none is preempted for block_size steps."""
        return self.num_running + 1 if self._running else 0

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        mode = self._kv_cache.preempt([sequence])
        sequence.status = SequenceStatus.SWAPPED if mode is PreemptionMode.SWAP else SequenceStatus.WAITING
        self._policy.put_back(sequence)

    def _update(
        self, sequence: Sequence, token_id: int | None, logprobs: TokenLogprobs | None, error: str | None
    ) -> SequenceUpdate:
        if error is not None:
            self._end(sequence)
            return SequenceUpdate(sequence, error=error)
        assert token_id is not None, f"{sequence.request_id} was to sample; the executor gave neither token nor failure"
        sequence.output_token_ids.append(token_id)
        reason = finish_reason(sequence, self.max_num_tokens)
        if reason is not None:
            self._end(sequence)
        return SequenceUpdate(sequence, [token_id], reason, new_logprobs=[logprobs] if logprobs else None)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence, SequenceStatus.FINISHED)
        else:  # it was preempted while the step that ends it was running, or it never started
            self._policy.remove(sequence.request_id)
            self._kv_cache.free(sequence)  # in host memory
            sequence.status = SequenceStatus.FINISHED

    def _leave(self, sequence: Sequence, status: SequenceStatus) -> None:
        del self._running[sequence.request_id]
        self._kv_cache.free(sequence)
        sequence.status = status
