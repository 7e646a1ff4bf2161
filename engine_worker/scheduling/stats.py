"""Counts of the engine as frozen snapshots, for metrics, heartbeats, and tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_worker.kv.kv_durations import KVDurations
from engine_worker.kv.kv_events import KVTotals
from engine_worker.kv.kv_stats import KVCacheStats
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.speculation.totals import SpeculationTotals
from shared.messages import FinishReason

ERROR = "error"  # the end of a request that has no FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One engine step. Its phases are schedule and apply of the engine, and prepare, forward, and sample."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Totals since the start of the engine."""

    steps: int
    computed_tokens: int  # tokens computed by the model, including those recomputed after a preemption
    prompt_tokens_computed: int  # the part that belongs to prompts
    generated_tokens: int
    recomputed_tokens: int  # computed again after a preemption
    preemptions: Mapping[str, int]  # by mode: recompute, swap
    swapped_in_blocks: int  # from the host to the device, for returning sequences and for prefixes
    swapped_out_blocks: int
    finished: Mapping[str, int]  # by reason: stop, length, cancelled, error

    @property
    def num_served(self) -> int:
        """Return how many requests have ended. Cancelled ones do not count, because some of them never ran."""
        return sum(count for reason, count in self.finished.items() if reason != FinishReason.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    kv_cache: KVCacheStats
    last_step: StepStats
    counters: EngineCounters
    kv_totals: KVTotals = field(default_factory=KVTotals)
    kv_durations: KVDurations = field(default_factory=KVDurations)
    num_swapped: int = 0  # part of num_waiting
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)


class StepRecorder:
    """Counts steps, tokens, and ended requests."""

    def __init__(self) -> None:
        self.last_step = StepStats()
        self._steps = self._computed = self._prompt_computed = self._recomputed = self._generated = 0
        self._finished = dict.fromkeys([*FinishReason, ERROR], 0)

    def record_no_step(self) -> None:
        """Record a call of step() that computed nothing: requests may have ended, or a step started that ends later."""
        self.last_step = StepStats()

    def record_step(self, batch: ScheduledBatch, num_sampled_tokens: int, phase_seconds: Mapping[str, float]) -> None:
        if not batch.sequences:  # the batch only moved blocks
            self.record_no_step()
            return
        self.last_step = StepStats(
            num_sequences=len(batch.sequences),
            num_tokens=batch.num_tokens,
            num_sampled_tokens=num_sampled_tokens,
            phase_seconds=phase_seconds,
        )
        self._steps += 1
        self._computed += self.last_step.num_tokens
        for scheduled in batch.sequences:
            start, num_dropped = scheduled.start, scheduled.sequence.num_dropped_tokens
            if start < num_dropped:
                self._recomputed += min(scheduled.end, num_dropped) - start
            num_prompt = len(scheduled.sequence.prompt_token_ids)
            if start < num_prompt:
                self._prompt_computed += min(scheduled.end, num_prompt) - start
        self._generated += num_sampled_tokens

    def record_end(self, reason: str) -> None:
        self._finished[reason] += 1

    def counters(self, kv: KVTotals) -> EngineCounters:
        return EngineCounters(
            steps=self._steps,
            computed_tokens=self._computed,
            prompt_tokens_computed=self._prompt_computed,
            generated_tokens=self._generated,
            recomputed_tokens=self._recomputed,
            preemptions={"recompute": kv.recompute_preemptions, "swap": kv.swap_preemptions},
            swapped_in_blocks=kv.swapped_in_blocks + kv.fetched_blocks,
            swapped_out_blocks=kv.swapped_out_blocks + kv.offloaded_blocks,
            finished={str(reason): count for reason, count in self._finished.items()},
        )
