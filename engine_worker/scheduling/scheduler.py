"""Which tokens are computed in the next step: schedule() decides, an executor computes, apply() takes in its samples.

    schedule() apply() schedule() apply() ...            one step at a time
    schedule() schedule() apply() schedule() apply() ... one ahead: what a running step samples counts as a token

Results are applied in the order of scheduling, and at most one step is not applied when the next is scheduled.

One token budget a step; there is no prefill or decode phase: every sequence's computed tokens catch up with its tokens.

    1. running sequences that lack one token (they decode): always all of them, so no prompt ever delays a stream
    2. running sequences that lack more (prompts in chunks, oldest first), with what is left of the budget
    3. waiting sequences, in order, while seats, budget and blocks last
    4. the same of background requests, in their share (background_share.py), unless 2 or 3 found a prompt

A request is a SequenceGroup. Its first sequence computes the prompt; in the step that reaches the prompt's end the
others fork from it, and all sample their first token of the same logits. From then on each is a sequence like any
other, but they come and go together: a group is admitted when there is room for all of it, and preempted as a whole.

When a running sequence needs a block and none is free, the newest group is preempted: its KV goes to host memory, or
is dropped and computed again later. Nobody is admitted in the same step, and never into the last free blocks (see
_headroom_blocks). A group that is alone always fits, because none of its sequences gets longer than
`max_num_tokens_of(...)` allows: so the oldest moves on in every step, and no group waits for ever.

A sequence that ends while a step with it is running is out at once, and what that step samples for it is dropped. One
that is preempted then keeps its sample.

Knows nothing of events, requests' validity, time or devices. Used by one thread.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from engine_worker.scheduling.background_share import BackgroundShare
from engine_worker.scheduling.batch import ScheduledBatch, SequenceUpdate, StepResult
from engine_worker.scheduling.beam_search import BeamSearch
from engine_worker.scheduling.intake import NOTHING, Intake, IntakeForecast
from engine_worker.scheduling.kv_durations import KVDurations
from engine_worker.scheduling.kv_events import KVTotals
from engine_worker.scheduling.kv_slots import KVSlots
from engine_worker.scheduling.kv_view import kv_view
from engine_worker.scheduling.policy import FirstComeFirstServed
from engine_worker.scheduling.preemption import PreemptionMode
from engine_worker.scheduling.scheduler_config import SchedulerConfig
from engine_worker.scheduling.sequence import BeamCandidate, Sequence, SequenceStatus, finish_reason
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.stats import KVCacheStats
from engine_worker.scheduling.step_plan import StepPlan, survey
from shared.messages import EncodedLogprobs

__all__ = ["Scheduler", "SchedulerConfig", "SequenceUpdate"]


class Scheduler:
    """It decides what a step does. It has many members because metrics and heartbeats read its counts between steps."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVSlots, policy: FirstComeFirstServed | None = None) -> None:
        self.config = config
        self._kv_cache = kv_cache
        self.most_blocks_each = kv_cache.most_blocks(config.max_model_len)  # that any sequence holds at one time
        self._policy = policy or FirstComeFirstServed()
        self._running: dict[str, SequenceGroup] = {}  # by request id, in order of admission
        self._background_share = BackgroundShare(config, kv_cache.num_usable_blocks)
        self._forecast = IntakeForecast(config, kv_cache.block_size, self.most_blocks_each)
        self._waits_for = ""  # what the first of the queue lacked in the last step

    @property
    def num_usable_blocks(self) -> int:
        return self._kv_cache.num_usable_blocks

    @property
    def block_size(self) -> int:
        return self._kv_cache.block_size

    @property
    def num_running(self) -> int:
        """Requests, as those that wait are."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def num_swapped(self) -> int:
        """The waiting requests whose KV is in host memory."""
        return sum(group.is_swapped for group in self._policy)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether a sequence is running whose next step can't be prepared before its last token is known."""
        return any(group.active[0].needs_last_token_on_host for group in self._running.values())

    @property
    def intake(self) -> Intake:
        """The claims to make of interactive requests."""
        budget_tokens = self.config.prefill_budget(min(1, self.num_running))  # nobody knows how many will decode
        seats, blocks = self._num_free_seats(), self._num_spare_blocks()
        return self._forecast.intake(self._policy.interactive, seats, blocks, budget_tokens)

    @property
    def background_intake(self) -> Intake:
        """The claims to make of background requests (class `batch`); none while others wait."""
        if self._policy.num_interactive:
            return NOTHING
        free_seats = min(self._num_free_seats(), self._background_share.seats - self._num_background_seats())
        spare_blocks = self._num_spare_blocks() - (self._background_share.reserved_blocks if self._running else 0)
        budget_tokens = self._background_share.prefill_budget(self.num_running)
        return self._forecast.intake(self._policy, free_seats, spare_blocks, budget_tokens, is_background=True)

    def max_num_tokens_of(self, num_prompt_tokens: int, num_sequences: int) -> int:
        """The longest that each sequence of a group gets, so that all of it fits when it is alone.

        They share at least the full blocks of their prompt, and may come to share nothing else. Where each can have
        what it holds at most, as it may with a window, they may get any length.
        """
        if self.most_blocks_each * num_sequences <= self._kv_cache.num_usable_blocks:
            return self.config.max_model_len
        shared_blocks = num_prompt_tokens // self.block_size
        own_blocks = (self._kv_cache.num_usable_blocks - shared_blocks) // num_sequences
        return min(self.config.max_model_len, (shared_blocks + own_blocks) * self.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a request of one sequence."""
        self.add_group(SequenceGroup([sequence]))

    def add_group(self, group: SequenceGroup) -> None:
        """Queue `group`, whose request id is not in use."""
        first = group.sequences[0]
        group.max_num_tokens = self.max_num_tokens_of(group.num_prompt_tokens, group.sampling.num_sequences)
        assert first.num_tokens < group.max_num_tokens, f"{group.request_id} could never be computed and sampled"
        assert group.num_seats <= self.config.max_num_seqs, f"{group.request_id} needs {group.num_seats} seats"
        if group.sampling.use_beam_search:
            max_output_tokens = min(group.sampling.max_tokens, group.max_num_tokens - group.num_prompt_tokens)
            group.beam_search = BeamSearch(group.sampling, first.stop_token_ids, max_output_tokens)
        self._forecast.added(group)
        self._policy.add(group)

    def abort(self, request_id: str) -> None:
        """Drop a request wherever it is, and its blocks at once. Unknown ids are ignored."""
        group = self._group(request_id)
        if group is not None:
            self._end(group)

    def withdraw_waiting(self, most: int) -> list[str]:
        """Drop interactive requests of which nothing was computed here, the newest first. Returns their ids."""
        fresh = [group for group in self._policy if not group.is_background and group.is_fresh]
        return self._withdraw(fresh[max(0, len(fresh) - most) :])

    def withdraw(self, request_ids: Collection[str]) -> list[str]:
        """Drop those of them of which nothing was computed here. Returns their ids."""
        return self._withdraw([group for group in self._policy if group.is_fresh and group.request_id in request_ids])

    def _withdraw(self, groups: list[SequenceGroup]) -> list[str]:
        for group in groups:
            self._end(group)
        return [group.request_id for group in groups]

    def schedule(self) -> ScheduledBatch:
        """Decide what is computed next; from here on it counts as computed."""
        self._kv_cache.release_behind()
        # Before anything forks: forks get no room in this step.
        wanted, background = survey(self._running.values(), self._kv_cache)
        preempted = self._make_room([*wanted.needing, *background.needing])
        if preempted:
            wanted.drop(preempted)
            background.drop(preempted)
        self._waits_for = "blocks" if preempted else "its share of a step"
        plan = StepPlan(self._kv_cache)
        self._forecast.scheduling((of for _, of in wanted.behind), (of for _, of in background.behind))
        plan.add_decodes(wanted.decodes)
        prefills = self._prefills(wanted.behind, may_admit=not preempted)
        has_prompts = plan.add_prefills(prefills, self.config.prefill_budget(len(plan.sequences)))
        self._background_share.count_step(has_interactive=bool(plan.sequences or self._policy.num_interactive))
        if not has_prompts:
            plan.add_decodes(background.first_decodes(self._background_share.seats))
            prefills = self._prefills(background.behind, may_admit=not preempted, is_background=True)
            plan.add_prefills(prefills, self._background_share.prefill_budget(len(plan.sequences)))
        transfers = self._kv_cache.take_transfers()
        return ScheduledBatch(
            plan.sequences,
            transfers.block_copies,
            transfers.swap_out,
            transfers.swap_in,
            transfers.batch_number,
        )

    def apply(self, batch: ScheduledBatch, result: StepResult) -> list[SequenceUpdate]:
        """One update for each sequence that got a token or ended; ended sequences have given up their blocks."""
        for time in result.transfer_times:
            self._kv_cache.events.measured(time.batch_number, time.swap_out_seconds, time.swap_in_seconds)
        updates, failures = [], result.failures
        logprobs = result.logprobs or [None] * len(batch.sequences)
        sampled = zip(batch.sequences, result.sampled_token_ids, logprobs, strict=True)
        for scheduled, token_id, token_logprobs in sampled:
            sequence = scheduled.sequence
            sequence.num_inflight_tokens -= scheduled.samples
            if sequence.status is SequenceStatus.FINISHED:
                continue  # it ended after it was scheduled
            if failures and (error := failures.get(sequence.request_id)) is not None:
                updates.append(self._fail(sequence, error))
            elif scheduled.samples and not sequence.sampling.use_beam_search:
                updates.append(self._update(sequence, token_id, token_logprobs))
        for request_id, candidates in result.beam_candidates.items():
            group = self._running.get(request_id)
            if group is not None:
                updates += self._advance_beams(group, candidates)
        return updates

    def kv_cache_stats(self) -> KVCacheStats:
        return self._kv_cache.stats(self._active_sequences())

    def kv_view(self) -> dict[str, Any]:
        """Describe the KV of all sequences; children that have no blocks yet wait for the first of their group."""
        sequences = [sequence for group in (*self._running.values(), *self._policy) for sequence in group.sequences]
        return kv_view(self._kv_cache, sequences, self._waits_for if self.num_waiting else "")

    def kv_events(self, since: int) -> dict[str, Any]:
        """Return the events after the number `since`."""
        return self._kv_cache.events.since(since)

    @property
    def kv_totals(self) -> KVTotals:
        return self._kv_cache.events.totals

    @property
    def kv_durations(self) -> KVDurations:
        return self._kv_cache.events.durations

    def check_integrity(self) -> None:
        """Raise AssertionError unless block tables, pool and statuses agree. Between steps only."""
        active = self._active_sequences()
        waiting = [sequence for group in self._policy for sequence in group.sequences]
        self._kv_cache.check_integrity([*active, *waiting])
        for sequence in waiting:
            assert bool(sequence.kv.host_block_table) == (sequence.status is SequenceStatus.SWAPPED), (
                sequence.request_id
            )
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in active)
        assert all(0 <= sequence.num_inflight_tokens <= 1 for sequence in active)
        assert all(len(group.active) in (1, len(group.sequences)) for group in self._running.values())
        assert len(active) <= self._num_taken_seats() <= self.config.max_num_seqs

    def _active_sequences(self) -> list[Sequence]:
        return [sequence for group in self._running.values() for sequence in group.active]

    def _num_taken_seats(self) -> int:
        return sum(group.num_seats for group in self._running.values())

    def _num_background_seats(self) -> int:
        return sum(group.num_seats for group in self._running.values() if group.is_background)

    def _num_free_seats(self) -> int:
        return self.config.max_num_seqs - self._num_taken_seats()

    def _num_spare_blocks(self) -> int:
        return self._kv_cache.num_available_blocks - self._headroom_blocks(1)

    def _group(self, request_id: str) -> SequenceGroup | None:
        return self._running.get(request_id) or self._policy.get(request_id)

    def _make_room(self, needing: list[tuple[SequenceGroup, list[Sequence]]]) -> list[SequenceGroup]:
        """All blocks for those that are `needing` some, oldest first. Returns the preempted."""
        preempted: list[SequenceGroup] = []
        for group, sequences in needing:
            if group.request_id in self._running:  # else it yielded to an older one
                preempted += self._make_room_for(group, sequences)
        return preempted

    def _make_room_for(self, group: SequenceGroup, needing: list[Sequence]) -> list[SequenceGroup]:
        """All or nothing: a group that yields has no copy planned, which would come too late for a swap."""
        preempted: list[SequenceGroup] = []
        while not self._kv_cache.can_allocate(*needing):
            victim = self._policy.choose_victim(self._running, group)
            self._preempt(victim)
            preempted.append(victim)
            if victim is group:
                return preempted
        for sequence in needing:
            self._kv_cache.allocate(sequence)
        return preempted

    def _prefills(
        self, behind: list[tuple[SequenceGroup, Sequence]], may_admit: bool, is_background: bool = False
    ) -> Iterator[tuple[SequenceGroup, Sequence]]:
        """Yield the sequences that are `behind`, then those of new groups, each admitted when it is asked for.

        One whose KV comes from the host is admitted now and takes part in the next step, so that the copy and this step
        run at the same time; so does a forked one, which then gets copies of the blocks that it shares and writes to.
        """
        yield from behind
        while may_admit and (group := self._admit(is_background)) is not None:
            first, *others = group.active
            if not others and not self._kv_cache.is_arriving(first) and group.num_prefill_tokens(first):
                self._forecast.begun(first, is_background=is_background)
                yield group, first

    def _admit(self, is_background: bool) -> SequenceGroup | None:
        group = self._policy.first()
        if group is None or group.is_background != is_background:
            return None
        self._waits_for = self._reserve(group)
        if self._waits_for:
            return None
        self._policy.pop_first()
        for sequence in group.active:
            sequence.status = SequenceStatus.RUNNING
        self._running[group.request_id] = group
        return group

    def _reserve(self, group: SequenceGroup) -> str:
        """Give `group` its blocks, if there are a seat and room for it; else what it waits for is returned."""
        if self._num_taken_seats() + group.num_seats > self.config.max_num_seqs:
            return "a seat" if group.num_seats == 1 else f"{group.num_seats} seats"
        if group.is_background and not self._background_share.has_seats(self._num_background_seats(), group.num_seats):
            return "a seat of its class"
        if group.has_inflight_tokens:  # preempted just now; its tokens come before the next step is scheduled
            return "its token in flight"
        return "" if self._try_admit(group, self._headroom_blocks(group.num_seats)) else "blocks"

    def _try_admit(self, group: SequenceGroup, headroom_blocks: int) -> bool:
        """Blocks for what is active, and room for what is to be forked."""
        first = group.sequences[0]
        headroom_blocks += group.num_fork_blocks(self.block_size, self.most_blocks_each)
        if group.is_background and self._running:
            headroom_blocks += self._background_share.reserved_blocks
        if group.is_swapped:
            return self._kv_cache.try_swap_in(group.active, headroom_blocks)
        if not self._kv_cache.try_admit(first, headroom_blocks):
            return False
        if group.num_preemptions == 0:
            group.num_cached_tokens = first.num_cached_tokens
            self._forecast.admitted(group)
        group.active = [first]
        return True

    def _headroom_blocks(self, num_seats: int) -> int:
        """Blocks an admission leaves free: one for each sequence, so that none is preempted for block_size steps.

        Half as many where a preempted one is swapped, which costs the others next to nothing (ADR 0048).
        """
        num_blocks = self._num_taken_seats() + num_seats if self._running else 0
        return -(-num_blocks // 2) if self._kv_cache.may_swap else num_blocks

    def _preempt(self, group: SequenceGroup) -> None:
        del self._running[group.request_id]
        group.preempted(is_swap=self._kv_cache.preempt(group.active) is PreemptionMode.SWAP)
        self._policy.put_back(group)

    def _fail(self, sequence: Sequence, error: str) -> SequenceUpdate:
        group = self._group(sequence.request_id)
        assert group is not None
        self._end(group, self._kv_cache.discard)
        return SequenceUpdate(sequence, error=error)

    def _update(self, sequence: Sequence, token_id: int | None, logprobs: EncodedLogprobs | None) -> SequenceUpdate:
        group = self._running.get(sequence.request_id) or self._group(sequence.request_id)  # mostly without a call
        assert group is not None
        assert token_id is not None, f"{sequence.request_id} was to sample; the executor gave neither token nor failure"
        sequence.output_token_ids.append(token_id)
        self._forecast.advanced(sequence)
        reason = finish_reason(sequence, group.max_num_tokens)
        if reason is not None:
            self._forecast.ended([sequence])
            self._kv_cache.free(sequence)
            group.end_sequence(sequence)
            if not group.sequences:
                self._end(group)
        return SequenceUpdate(
            sequence,
            [token_id],
            reason,
            new_logprobs=None if logprobs is None else [logprobs],
            ended_group=None if group.sequences else group,
        )

    def _advance_beams(self, group: SequenceGroup, candidates: list[BeamCandidate]) -> list[SequenceUpdate]:
        search, first = group.beam_search, group.active[0]
        assert search is not None
        moves = search.advance([beam.output_token_ids for beam in group.active], candidates)
        if moves:
            group.move_beams(moves, self._kv_cache)
            return [SequenceUpdate(first)]
        answers = search.best()
        self._end(group)
        ended = group.end_search(first, answers)
        updates = [
            SequenceUpdate(sequence, answer.token_ids, answer.reason)
            for sequence, answer in zip(ended, answers, strict=True)
        ]
        return [*updates[:-1], replace(updates[-1], ended_group=group)]

    def _end(self, group: SequenceGroup, give_up: Callable[[Sequence], None] | None = None) -> None:
        """End a group that runs, or that was preempted while the step that ends it was running, or that never began.

        `give_up` takes its blocks; the default leaves them to the prefix cache.
        """
        give_up = give_up or self._kv_cache.free
        if self._running.pop(group.request_id, None) is None:
            self._policy.remove(group.request_id)
        self._forecast.ended(group.sequences)
        for sequence in group.active:
            give_up(sequence)
        group.end()
