"""Decides what each step computes: schedule() decides, an executor computes, apply() takes the samples.

    schedule() apply() schedule() apply() ...            one step at a time
    schedule() schedule() apply() schedule() apply() ... one step ahead: a sample in flight counts as a token

Results are applied in order, at most one step late. A step has one token budget and no prefill or decode phase:

    1. running sequences that lack one token (decodes): always all of them, so a prompt never delays a stream
    2. running sequences that lack more (prompts in chunks, oldest first), within the rest of the budget
    3. the first sequences of waiting requests, then the others of running ones, while slots, budget, and blocks last
       (admission.py)
    4. the same for background requests, within their share (background_share.py), unless 2 or 3 found a prompt

If running sequences lack blocks, the newest is preempted: swapped to host memory, or recomputed later. That step admits
nothing, and admission leaves some blocks free. A single sequence always fits (`max_num_tokens_of`), so the oldest
progresses in every step and no request starves. One sequence per step yields its slot when another tenant waits below
its share (policy.py). A sequence that ends during a step is removed at once and its sample dropped; a preempted one
keeps its sample. With speculative decoding a decode may compute drafts as well (speculation/). Use it in one thread.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.kv_durations import KVDurations
from engine_worker.kv.kv_events import KVTotals
from engine_worker.kv.kv_stats import KVCacheStats
from engine_worker.kv.kv_view import kv_view
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import BeamCandidate, Sequence, SequenceStatus, finish_reason
from engine_worker.kv.span import KVSpans
from engine_worker.scheduling.admission import Admission
from engine_worker.scheduling.background_share import BackgroundShare
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence, SequenceUpdate, StepResult
from engine_worker.scheduling.beam_search import BeamSearch
from engine_worker.scheduling.claim_budget import NO_CLAIMS, ClaimBudget, PrefillEstimator
from engine_worker.scheduling.policy import FairShare
from engine_worker.scheduling.running_slots import RunningSlots
from engine_worker.scheduling.scheduler_config import SchedulerConfig
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.speculation.drafting import Drafting
from engine_worker.scheduling.speculation.totals import SpeculationTotals
from engine_worker.scheduling.step_plan import NO_DRAFTS, Place, StepDemand, StepPlan, collect_demand, running_of
from shared.messages import EncodedLogprobs

__all__ = ["Scheduler", "SchedulerConfig", "SequenceUpdate"]

MAX_NEW_TENANTS = 4  # tenants without a slot that may have a request here, so that they can get a share


class Scheduler:
    """Decides what a step computes. Metrics and heartbeats read its counts between steps."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVAllocator, drafting: Drafting | None = None) -> None:
        """Schedule over `kv_cache`; `drafting`: None: no speculative decoding."""
        self.config = config
        self._kv_cache = kv_cache
        self._drafting = drafting
        self._slots = RunningSlots(config.max_num_seqs)
        self._policy = FairShare(self._slots)
        self._background_share = BackgroundShare(config, kv_cache.num_usable_blocks)
        self._estimator = PrefillEstimator(config, kv_cache.spans)
        self._admission = Admission(kv_cache, self._policy, self._slots, self._background_share, self._estimator)
        self._running = self._admission.running

    @property
    def num_usable_blocks(self) -> int:
        return self._kv_cache.num_usable_blocks

    @property
    def spans(self) -> KVSpans:
        return self._kv_cache.spans

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states."""
        return self._kv_cache.has_states

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def num_swapped(self) -> int:
        """The requests with KV in host memory."""
        return sum(group.is_swapped for group in (*self._policy, *self._running.values()))

    @property
    def needs_last_tokens(self) -> bool:
        """Whether a running sequence needs its last token on the host to schedule its next step."""
        drafting = self._drafting
        is_on = drafting is not None and drafting.is_on(self._num_taken_slots)
        if drafting is not None and is_on and not drafting.runs_ahead(self._active_sequences()):
            return True
        return any(group.active[0].needs_last_token_on_host for group in self._running.values())

    @property
    def claim_budget(self) -> ClaimBudget:
        """The interactive requests to claim."""
        budget_tokens = self.config.prefill_budget(min(1, self.num_running))  # the number of decodes is not known yet
        waiting = self._policy.ready(is_background=False)
        claim_budget = self._estimator.claim_budget(
            waiting, self._num_free_slots(), self._num_spare_blocks(), budget_tokens
        )
        tenants = self._policy.waiting_tenants(is_background=False)
        num_new = sum(not self._slots.held(name) for name in tenants)
        num_others = max(0, MAX_NEW_TENANTS - num_new) if self._slots.has_keys else 0
        return replace(claim_budget, num_others=num_others, waiting_tenants=frozenset(tenants))

    @property
    def background_claim_budget(self) -> ClaimBudget:
        """The background requests (class `batch`) to claim; none while interactive ones wait."""
        if self._policy.num_interactive:
            return NO_CLAIMS
        free_slots = min(self._num_free_slots(), self._background_share.num_slots - self._slots.num_background)
        spare_blocks = self._num_spare_blocks() - (self._background_share.reserved_blocks if self._running else 0)
        budget_tokens = self._background_share.prefill_budget(self.num_running)
        return self._estimator.claim_budget(self._policy, free_slots, spare_blocks, budget_tokens, is_background=True)

    def _num_free_slots(self) -> int:
        """Return the sequences that can start: each takes a slot, and a recurrent state if the model has them."""
        num_free, num_states = self._slots.num_free, self._kv_cache.num_available_states
        return num_free if num_states is None else min(num_free, num_states)

    def max_num_tokens_of(self, num_prompt_tokens: int, num_beams: int = 1) -> int:
        """Return the maximum length of a sequence, in tokens, so that it fits when it runs alone.

        Beams share at least the full blocks of their prompt, and may share nothing else.
        """
        num_usable, limit = self._kv_cache.num_usable_blocks, self.config.max_model_len
        return self._kv_cache.spans.max_tokens(num_usable, limit, num_prompt_tokens, num_beams)

    def add(self, sequence: Sequence) -> None:
        """Queue a request of one sequence."""
        self.add_group(SequenceGroup([sequence]))

    def add_group(self, group: SequenceGroup) -> None:
        """Queue `group`, whose request id is not in use."""
        first, num_slots = group.sequences[0], group.num_slots_to_start
        group.max_num_tokens = self.max_num_tokens_of(group.num_prompt_tokens, num_slots)
        assert first.num_tokens < group.max_num_tokens, f"{group.request_id} could never be computed and sampled"
        assert num_slots <= self.config.max_num_seqs, f"{group.request_id} needs {num_slots} running slots"
        if group.sampling.use_beam_search:
            max_output_tokens = min(group.sampling.max_tokens, group.max_num_tokens - group.num_prompt_tokens)
            group.beam_search = BeamSearch(group.sampling, first.stop_token_ids, max_output_tokens)
        self._estimator.added(group)
        self._policy.add(group)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks at once. Unknown ids are ignored."""
        group = self._group(request_id)
        if group is not None:
            self._end(group)

    def withdraw_waiting(self, max_requests: int) -> list[str]:
        """Drop interactive requests that have not started, the newest first. Return their ids."""
        fresh = [group for group in self._policy.waiting(is_background=False) if group.is_fresh]
        fresh.sort(key=lambda group: group.arrival)
        return self._withdraw(fresh[max(0, len(fresh) - max_requests) :])

    def withdraw(self, request_ids: Collection[str]) -> list[str]:
        """Drop those of the requests that have not started. Return their ids."""
        return self._withdraw([group for group in self._policy if group.is_fresh and group.request_id in request_ids])

    def _withdraw(self, groups: list[SequenceGroup]) -> list[str]:
        for group in groups:
            self._end(group)
        return [group.request_id for group in groups]

    def schedule(self, *, ahead: bool = False) -> ScheduledBatch:
        """Decide what is computed next. From here on it counts as computed.

        `ahead`: The previous step may not be applied yet. Only drafts that stay on the device are made then.
        """
        self._kv_cache.release_outside_window()
        wanted, background = collect_demand(self._running.values(), self._kv_cache)
        yielded = self._yield_to_share(wanted, background)
        # Before forks are planned, because they get no blocks in this step.
        has_preempted = self._make_room(wanted, background)
        incomplete = [*wanted.incomplete, *background.incomplete]
        self._admission.begin_step(incomplete, has_preempted=has_preempted, yielded=yielded)
        plan = StepPlan(self._kv_cache, self._admission.claim_fork)
        self._estimator.scheduling((of for _, of in wanted.prefills), (of for _, of in background.prefills))
        has_new = bool(incomplete or self.num_waiting)
        drafts = self._drafts_of(wanted.decodes, has_new=has_new, ahead=ahead)
        plan.add_decodes(wanted.decodes, drafts)
        prefills = self._prefills(wanted, is_background=False)
        has_prompts = plan.add_prefills(prefills, self.config.prefill_budget(len(plan.sequences) + plan.num_drafts))
        self._background_share.count_step(has_interactive=bool(plan.sequences or self._policy.num_interactive))
        if not has_prompts:
            plan.add_decodes(background.first_decodes(self._background_share.num_slots))
            prefills = self._prefills(background, is_background=True)
            num_decodes = len(plan.sequences) + plan.num_drafts
            plan.add_prefills(prefills, self._background_share.prefill_budget(num_decodes))
        drafting, num_taken = self._drafting, self._num_taken_slots
        num_to_make = drafting.num_to_make(plan.sequences, num_taken) if drafting is not None else 0
        return ScheduledBatch(plan.sequences, self._kv_cache.take_transfers(), num_to_make)

    def apply(self, batch: ScheduledBatch, result: StepResult) -> list[SequenceUpdate]:
        """Apply a step's result. Return an update per sequence that got a token or ended; ended ones have no blocks."""
        for time in result.transfer_times:
            self._kv_cache.events.measured(time.batch_number, time.swap_out_seconds, time.swap_in_seconds)
        updates, failures = [], result.failures
        logprobs = result.logprobs or [None] * len(batch.sequences)
        sampled = zip(batch.sequences, result.sampled_token_ids, logprobs, strict=True)
        finished = SequenceStatus.FINISHED  # names that are read per sampled sequence and step
        for scheduled, token_ids, token_logprobs in sampled:
            sequence, drafts, samples = scheduled.sequence, scheduled.drafts, scheduled.samples
            sequence.num_inflight_tokens -= scheduled.num_samples if drafts else samples
            if sequence.status is finished:
                continue  # ended after it was scheduled
            if failures and (error := failures.get(sequence.request_id)) is not None:
                updates.append(self._fail(sequence, error))
            elif samples and not sequence.sampling.use_beam_search:
                assert token_ids, f"{sequence.request_id}: the executor returned neither a token nor a failure"
                if drafts:
                    updates.append(self._update_drafted(scheduled, token_ids, token_logprobs))
                else:
                    updates.append(self._update(sequence, token_ids, token_logprobs))
        for request_id, candidates in result.beam_candidates.items():
            group = self._running.get(request_id)
            if group is not None:
                updates += self._advance_beams(group, candidates)
        self._keep_drafts(result.drafts)
        return updates

    def _keep_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        """Keep the drafts that a step made for sequences that go on."""
        for sequence, token_ids in drafts.items():
            if self._drafting is not None and sequence.status is not SequenceStatus.FINISHED:
                self._drafting.received(sequence, token_ids)

    def step_took(self, batch: ScheduledBatch, num_tokens: int, seconds: float) -> None:
        """Record the time of an applied step, which gave `num_tokens` tokens."""
        if self._drafting is not None:
            self._drafting.step_took(batch, num_tokens, seconds)

    @property
    def speculation_totals(self) -> SpeculationTotals:
        """The counts of drafts; all 0 without speculative decoding."""
        return SpeculationTotals() if self._drafting is None else self._drafting.totals

    def kv_cache_stats(self) -> KVCacheStats:
        return self._kv_cache.stats(self._active_sequences())

    def kv_view(self) -> dict[str, Any]:
        """Return the KV of all sequences. Forks without blocks wait for the first sequence of their group."""
        sequences = [sequence for group in (*self._running.values(), *self._policy) for sequence in group.sequences]
        return kv_view(self._kv_cache, sequences, self._admission.waits_for if self.num_waiting else "")

    def kv_events(self, since: int) -> dict[str, Any]:
        """Return the events after event number `since`."""
        return self._kv_cache.events.since(since)

    @property
    def kv_totals(self) -> KVTotals:
        return self._kv_cache.events.totals

    @property
    def kv_durations(self) -> KVDurations:
        return self._kv_cache.events.durations

    def check_integrity(self) -> None:
        """Raise AssertionError unless block tables, pool, and statuses agree. Call it between steps."""
        groups = [*self._running.values(), *self._policy]
        most_in_flight = 1 + (self._drafting.max_drafts if self._drafting is not None else 0)
        self._kv_cache.check_integrity([sequence for group in groups for sequence in group.sequences])
        for group in groups:
            for sequence in group.sequences:
                is_running, is_swapped = sequence in group.active, sequence.status is SequenceStatus.SWAPPED
                assert (sequence.status is SequenceStatus.RUNNING) is is_running, sequence.request_id
                assert sequence.kv.is_on_host is is_swapped, sequence.request_id
                assert 0 <= sequence.num_inflight_tokens <= most_in_flight, sequence.request_id
        assert all(group.active for group in self._running.values())
        assert not any(group.active for group in self._policy)
        self._slots.check_integrity(
            (group.tenant, group.num_slots, group.is_background) for group in self._running.values()
        )

    def _active_sequences(self) -> list[Sequence]:
        return [sequence for group in self._running.values() for sequence in group.active]

    @property
    def _num_taken_slots(self) -> int:
        return self.config.max_num_seqs - self._slots.num_free

    def _num_spare_blocks(self) -> int:
        return self._kv_cache.num_available_blocks - self._admission.headroom_blocks(1)

    def _group(self, request_id: str) -> SequenceGroup | None:
        return self._running.get(request_id) or self._policy.get(request_id)

    def _make_room(self, *demands: StepDemand) -> bool:
        """Give all running sequences the blocks that they lack. Return whether some were preempted.

        Preemption precedes allocation, so that no copy is planned for a preempted sequence: it would miss the swap.
        """
        has_preempted = False
        for demand in demands:
            needing = running_of(demand.needs_blocks)
            while needing and not self._kv_cache.can_allocate(*(sequence for _, sequence in needing)):
                self._preempt(self._policy.choose_victim(self._running, needing[0][0]))
                needing = running_of(needing)
                has_preempted = True
            for _, sequence in needing:
                self._kv_cache.allocate(sequence)
        for demand in demands if has_preempted else ():
            demand.drop_preempted()
        return has_preempted

    def _yield_to_share(self, *demands: StepDemand) -> SequenceGroup | None:
        """Preempt one sequence if a tenant waits below its share. Its request is admitted in this or the next step.

        Returns:
            The group that yielded, or None.
        """
        for waiting, num_slots in self._admission.blocked():
            victim = self._policy.choose_for_share(self._running, waiting, num_slots)
            if victim is not None:
                self._preempt(victim)
                if waiting.sampling.use_beam_search:
                    waiting.num_owed_slots += victim.num_slots_to_start
                for demand in demands:
                    demand.drop_preempted()
                return victim
        return None

    def _drafts_of(self, decodes: list[Place], *, has_new: bool, ahead: bool) -> Mapping[Sequence, tuple[int, ...]]:
        """Return the drafts of a step; with `has_new`, it may also begin sequences until no slot is free."""
        if self._drafting is None or (ahead and not self._drafting.runs_ahead(sequence for _, sequence in decodes)):
            return NO_DRAFTS
        num_sampled = self.config.max_num_seqs if has_new else self._num_taken_slots
        return self._drafting.drafts_of(decodes, num_sampled)

    def _prefills(self, demand: StepDemand, *, is_background: bool) -> Iterator[Place]:
        """Yield the sequences that lack more than one token, then new ones; each is admitted as the iterator advances.

        A sequence whose KV comes from the host is admitted now and runs in the next step, so that the copy overlaps
        with this step.
        """
        yield from demand.prefills
        for group, sequence in self._admission.admit(is_background=is_background):
            if not self._kv_cache.is_arriving(sequence) and group.num_prefill_tokens(sequence):
                self._estimator.begun(sequence, is_background=is_background)
                yield group, sequence

    def _preempt(self, group: SequenceGroup) -> None:
        """Preempt the newest sequence of `group`, or all of its beams."""
        sequences, num_slots = group.newest, group.num_slots
        mode = self._kv_cache.preempt(sequences)
        group.preempted(sequences, is_swap=mode is PreemptionMode.SWAP)
        self._give_back(group, num_slots - group.num_slots)
        self._wait_if_idle(group)

    def _wait_if_idle(self, group: SequenceGroup) -> None:
        """Queue a group if none of its sequences runs any more."""
        if not group.active:
            del self._running[group.request_id]
            self._policy.put_back(group)

    def _give_back(self, group: SequenceGroup, num_slots: int) -> None:
        if num_slots:
            self._slots.give_back(group.tenant, num_slots, is_background=group.is_background)

    def _fail(self, sequence: Sequence, error: str) -> SequenceUpdate:
        group = self._group(sequence.request_id)
        assert group is not None
        self._end(group, self._kv_cache.discard)
        return SequenceUpdate(sequence, error=error)

    def _update_drafted(
        self, scheduled: ScheduledSequence, token_ids: list[int], logprobs: list[EncodedLogprobs] | None
    ) -> SequenceUpdate:
        """Take the tokens of a step with drafts, up to one that ends the sequence."""
        assert self._drafting is not None, "a draft of no proposer"
        sequence = scheduled.sequence
        self._drafting.verified(sequence, len(scheduled.drafts), len(token_ids) - 1)
        group = self._group(sequence.request_id)
        assert group is not None
        # By all tokens of the step: a step in flight has followed them, also those after an end.
        self._kv_cache.retract(sequence, scheduled.num_samples - len(token_ids))
        for number, token_id in enumerate(token_ids[:-1], start=1):
            sequence.output_token_ids.append(token_id)
            if finish_reason(sequence, group.max_num_tokens) is not None:
                sequence.output_token_ids.pop()  # _update() appends the last one
                token_ids, logprobs = token_ids[:number], logprobs and logprobs[:number]
                break
        update = self._update(sequence, token_ids, logprobs)
        if sequence.status is SequenceStatus.RUNNING:
            self._kv_cache.trim(sequence)
        return update

    def _update(
        self, sequence: Sequence, token_ids: list[int], logprobs: list[EncodedLogprobs] | None
    ) -> SequenceUpdate:
        """Append the last of the tokens; those before it are in the output already."""
        group = self._running.get(sequence.request_id) or self._group(sequence.request_id)  # usually without a call
        assert group is not None
        sequence.output_token_ids.append(token_ids[-1])
        self._estimator.advanced(sequence)
        reason = finish_reason(sequence, group.max_num_tokens)
        if reason is not None:
            self._forget([sequence])
            self._kv_cache.free(sequence)
            num_slots = group.num_slots
            group.end_sequence(sequence)
            self._give_back(group, num_slots - group.num_slots)
            if not group.sequences:
                self._end(group)
            elif group.request_id in self._running:
                self._wait_if_idle(group)
        return SequenceUpdate(
            sequence,
            token_ids,
            reason,
            new_logprobs=logprobs,
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

    def _forget(self, sequences: list[Sequence]) -> None:
        """Record the end of sequences, for what keeps counts of them."""
        self._estimator.ended(sequences)
        if self._drafting is not None:
            self._drafting.ended(sequences)

    def _end(self, group: SequenceGroup, give_up: Callable[[Sequence], None] | None = None) -> None:
        """End a group that runs, waits, or was preempted during the step that ends it.

        `give_up` frees its blocks; the default keeps them in the prefix cache.
        """
        give_up = give_up or self._kv_cache.free
        if self._running.pop(group.request_id, None) is None:
            self._policy.remove(group)
        self._forget(group.sequences)
        self._give_back(group, group.num_slots)
        for sequence in group.sequences:
            if sequence.status is not SequenceStatus.WAITING:
                give_up(sequence)
        group.end()
