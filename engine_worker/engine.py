"""The continuous-batching loop: requests in, events out, one step at a time.

    step():  schedule -> submit -> collect -> apply -> emit

With `async_scheduling` it submits the next batch before it collects the previous one, so that the device never waits
for the host; step() then returns the events of the previous step, and one more call is needed at the end. It pauses
while a running sequence needs its last token on the host (beam search).

Each request ends in exactly one FinishEvent or ErrorEvent; an aborted one gives no more events. A bad request, or one
whose sampling fails, ends alone. An exception of the executor is not caught, because the device's state is unknown;
other workers resume the requests from their journals. Use it in one thread: it has no locks.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from msgspec import structs

from engine_worker.kv.prefix_cache import cache_root
from engine_worker.kv.sequence import Sequence, SequenceStatus, finish_reason
from engine_worker.kv.sequence_kv import SequenceKV
from engine_worker.scheduling.batch import ScheduledBatch, StepResult
from engine_worker.scheduling.claim_budget import ClaimBudget
from engine_worker.scheduling.request_checks import RequestLimits, RequestRefused, check_request
from engine_worker.scheduling.running_slots import Tenant
from engine_worker.scheduling.scheduler import Scheduler, SequenceUpdate
from engine_worker.scheduling.sequence_group import SequenceGroup
from engine_worker.scheduling.stats import ERROR, EngineStats, StepRecorder, StepStats
from shared.choice_seeds import choice_seed
from shared.messages import (
    ErrorCode,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    SamplingParams,
    StoredChoice,
    StreamEvent,
    TokenEvent,
    Usage,
)
from shared.redis_keys import PRIORITY_CLASSES

__all__ = ["BatchExecutor", "DuplicateRequest", "Engine", "EngineStats"]


class StepHandle(Protocol):
    """A step that was submitted."""

    def collect(self) -> StepResult:
        """Wait for the step's end. Call it once, in the order of submission."""


class BatchExecutor(Protocol):
    """ModelRunner on a device, FakeModelRunner in tests."""

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Start a step that has sequences, while at most one other step is submitted and not collected.

        It reads sequences and block tables before it returns, except tokens in flight.
        """


class DuplicateRequest(ValueError):
    """A request with this id is already in the engine."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    batch: ScheduledBatch
    handle: StepHandle
    schedule_seconds: float
    began_at: float


class Engine:
    """A scheduler and an executor, run step by step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: BatchExecutor,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float],
        async_scheduling: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = RequestLimits(
            vocab_size=vocab_size,
            max_model_len=scheduler.config.max_model_len,
            capacity_blocks=scheduler.num_usable_blocks,
            spans=scheduler.spans,
            max_beam_width=scheduler.config.max_beam_width,
            has_states=scheduler.has_states,
        )
        self._clock = clock
        self._async_scheduling = async_scheduling
        self._in_flight: _StepInFlight | None = None
        self._recorder = StepRecorder()
        self._last_step_ended_at = 0.0
        self._request_ids: set[str] = set()
        self._early_ends: dict[str, StreamEvent] = {}  # ends of requests that need no step; the next step emits them

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do: requests, or a step in flight to collect."""
        return bool(self._request_ids) or self._in_flight is not None

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests that were added and have not ended."""
        return frozenset(self._request_ids)

    @property
    def max_num_seqs(self) -> int:
        """The number of running slots."""
        return self._scheduler.config.max_num_seqs

    @property
    def claim_budget(self) -> ClaimBudget:
        """The interactive requests that a worker should claim."""
        return self._scheduler.claim_budget

    @property
    def background_claim_budget(self) -> ClaimBudget:
        """The background requests that a worker should claim, which leave room for interactive ones."""
        return self._scheduler.background_claim_budget

    @property
    def last_step(self) -> StepStats:
        """The counts of the last step, for histograms; cheap to read, unlike stats()."""
        return self._recorder.last_step

    def add_request(self, request: GenerationRequest, stored: Iterable[StoredChoice] = (), problem: str = "") -> None:
        """Queue a request.

        Args:
            request: Its id must not be in use.
            stored: The choices of its journal, after which it continues.
            problem: An error found before; the request then ends with it in the next step.

        Raises:
            DuplicateRequest: If a request with this id is in the engine.
        """
        if request.request_id in self._request_ids:
            raise DuplicateRequest(request.request_id)
        self._request_ids.add(request.request_id)
        choices = list(stored) or [StoredChoice() for _ in range(request.sampling.n)]
        try:
            if problem:
                raise RequestRefused(ErrorCode.INVALID_REQUEST, problem)
            check_request(request, choices, self._limits)
        except RequestRefused as refusal:
            self._early_ends[request.request_id] = ErrorEvent(request.request_id, refusal.code, str(refusal))
            return
        group = self._group(request, choices)
        if isinstance(group, FinishEvent):  # the previous owner died between the last token and the finish event
            self._early_ends[request.request_id] = group
        else:
            self._scheduler.add_group(group)

    def abort_request(self, request_id: str) -> None:
        """Drop a request and free its KV at once. No event follows. Unknown and ended ids are ignored.

        A step in flight still writes to its blocks; their new owners are computed after that step.
        """
        if request_id not in self._request_ids:
            return
        self._request_ids.discard(request_id)
        self._early_ends.pop(request_id, None)
        self._scheduler.abort(request_id)
        self._recorder.record_end(FinishReason.CANCELLED)

    def step(self) -> list[StreamEvent]:
        """Run a step, and return its events: prompt logprobs, then per choice at most one TokenEvent, then ends.

        Does nothing unless has_work.
        """
        ended, self._in_flight = self._in_flight, None
        ahead = self._async_scheduling and not self._scheduler.needs_last_tokens
        if ahead or ended is None:
            self._in_flight = self._begin_step(ahead=ahead)
        if not ahead and ended is None:
            ended, self._in_flight = self._in_flight, None
        if ended is None:
            self._recorder.record_no_step()
            return self._emit([])
        return self._end_step(ended)

    def _begin_step(self, *, ahead: bool) -> _StepInFlight | None:
        """Submit a step; None if there is nothing to compute: no sequence fits, or all last tokens are in flight."""
        started = self._clock()
        batch = self._scheduler.schedule(ahead=ahead)
        schedule_seconds = self._clock() - started
        if batch.is_empty:
            return None
        return _StepInFlight(batch, self._executor.submit(batch), schedule_seconds, started)

    def _end_step(self, step: _StepInFlight) -> list[StreamEvent]:
        result = step.handle.collect()
        collected = self._clock()
        prompt_events = _prompt_events(result)  # before the first token is added to the output
        updates = self._scheduler.apply(step.batch, result)
        applied = self._clock()
        apply_seconds = applied - collected
        phase_seconds = {"schedule": step.schedule_seconds, **result.phase_seconds, "apply": apply_seconds}
        num_tokens = sum(len(update.new_token_ids) for update in updates)
        self._recorder.record_step(step.batch, num_tokens, phase_seconds)
        # A step that ran ahead began before the previous one ended.
        self._scheduler.step_took(step.batch, num_tokens, applied - max(step.began_at, self._last_step_ended_at))
        self._last_step_ended_at = applied
        return [*prompt_events, *self._emit(updates)]

    def stats(self) -> EngineStats:
        """Return a snapshot of all counts."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_cache=self._scheduler.kv_cache_stats(),
            last_step=self._recorder.last_step,
            counters=self._recorder.counters(self._scheduler.kv_totals),
            kv_totals=replace(self._scheduler.kv_totals),
            kv_durations=self._scheduler.kv_durations.copy(),
            num_swapped=self._scheduler.num_swapped,
            speculation=self._scheduler.speculation_totals.copy(),
        )

    def kv_view(self) -> dict[str, Any]:
        """Return the state of every block and sequence, and why others wait, as JSON values."""
        return self._scheduler.kv_view()

    def kv_events(self, since: int) -> dict[str, Any]:
        """Return the block moves after event number `since`, as JSON values."""
        return self._scheduler.kv_events(since)

    def withdraw_waiting(self, max_requests: int) -> list[str]:
        """Drop interactive requests that have not started, the newest first. Return their ids."""
        withdrawn = self._scheduler.withdraw_waiting(max_requests)
        self._request_ids.difference_update(withdrawn)
        return withdrawn

    def withdraw(self, request_ids: Collection[str]) -> list[str]:
        """Drop those of the requests that have not started. Return their ids."""
        withdrawn = self._scheduler.withdraw(request_ids)
        self._request_ids.difference_update(withdrawn)
        return withdrawn

    def check_integrity(self) -> None:
        """Raise AssertionError unless the KV cache's counts balance and each request is counted once.

        Call it between steps.
        """
        self._scheduler.check_integrity()
        num_placed = self._scheduler.num_running + self._scheduler.num_waiting + len(self._early_ends)
        assert num_placed == len(self._request_ids), f"{num_placed} places for {len(self._request_ids)} requests"

    def _group(self, request: GenerationRequest, choices: list[StoredChoice]) -> SequenceGroup | FinishEvent:
        """Return the group of sequences left to generate, or the request's end if there are none."""
        sampling, is_background = request.sampling, request.priority_class != PRIORITY_CLASSES[0]
        tenant = Tenant(request.tenant, request.tenant_weight, request.tenant_max_running)
        sequences = [self._sequence(request, number, choice) for number, choice in enumerate(choices)]
        if sampling.use_beam_search and not choices[0].token_ids:
            # A beam search without an output starts again; one with an output has ended.
            return SequenceGroup(sequences[:1], is_background=is_background, tenant=tenant)
        longest = self._scheduler.max_num_tokens_of(
            len(request.prompt_token_ids), sampling.beam_width if sampling.use_beam_search else 1
        )
        reasons = [
            choice.finish_reason or finish_reason(sequence, longest)
            for choice, sequence in zip(choices, sequences, strict=True)
        ]
        num_ended_tokens = sum(len(choice.token_ids) for choice, reason in zip(choices, reasons, strict=True) if reason)
        left = [sequence for sequence, reason in zip(sequences, reasons, strict=True) if reason is None]
        if left and not sampling.use_beam_search:
            return SequenceGroup(left, num_ended_tokens, is_background=is_background, tenant=tenant)
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens)
        return FinishEvent(request.request_id, reasons[-1] or FinishReason.LENGTH, usage)

    def _sequence(self, request: GenerationRequest, number: int, choice: StoredChoice) -> Sequence:
        sampling = request.sampling
        eos_token_ids = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        return Sequence(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=_of_choice(sampling, number) if number else sampling,
            stop_token_ids=eos_token_ids.union(sampling.stop_token_ids),
            output_token_ids=choice.token_ids,
            sequence_index=number,
            num_scored_tokens=max(choice.prompt_logprobs, default=-1) + 1,
            kv=SequenceKV(cache_root=cache_root(request.tenant, request.cache_salt)),
            pooling=request.pooling,
        )

    def _emit(self, updates: list[SequenceUpdate]) -> list[StreamEvent]:
        events = list(self._early_ends.values())
        self._early_ends.clear()
        for update in updates:
            events += _events(update)
        for event in events:
            if not isinstance(event, TokenEvent):
                self._request_ids.remove(event.request_id)
                self._recorder.record_end(event.reason if isinstance(event, FinishEvent) else ERROR)
        return events


def _of_choice(sampling: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of a choice after the first; only the first reports prompt logprobs."""
    return structs.replace(sampling, seed=choice_seed(sampling.seed, number), prompt_logprobs=None)


def _prompt_events(result: StepResult) -> list[StreamEvent]:
    """Return each prompt logprob once; a preempted sequence may have computed it twice."""
    events: list[StreamEvent] = []
    for sequence, logprobs in result.prompt_logprobs:
        num_known = max(0, sequence.num_scored_tokens - logprobs.start)
        if sequence.status is SequenceStatus.FINISHED or num_known >= len(logprobs.tokens):
            continue
        new = PromptLogprobs(logprobs.start + num_known, logprobs.tokens[num_known:])
        sequence.num_scored_tokens = new.start + len(new.tokens)
        index, choice = sequence.num_output_tokens, sequence.sequence_index
        events.append(TokenEvent(sequence.request_id, index, [], choice, prompt_logprobs=new))
    return events


def _events(update: SequenceUpdate) -> list[StreamEvent]:
    sequence = update.sequence
    if update.error is not None:
        return [ErrorEvent(sequence.request_id, ErrorCode.REQUEST_FAILED, update.error)]
    choice_end = update.finish_reason if sequence.sampling.n > 1 else None  # else the FinishEvent has it
    new_token_ids, logprobs = update.new_token_ids, update.new_logprobs
    tokens = TokenEvent(sequence.request_id, update.index, new_token_ids, sequence.sequence_index, choice_end, logprobs)
    events: list[StreamEvent] = [tokens]
    if update.ended_group is not None and update.finish_reason is not None:
        events.append(_finish_event(update.ended_group, update.finish_reason))
    return events


def _finish_event(group: SequenceGroup, reason: FinishReason) -> FinishEvent:
    usage = Usage(
        prompt_tokens=group.num_prompt_tokens,
        completion_tokens=group.num_output_tokens,
        cached_tokens=group.num_cached_tokens,
    )
    return FinishEvent(group.request_id, reason, usage)
