"""What the engine counts: frozen snapshots for metrics, heartbeats and tests. No Prometheus here.

StepRecorder makes them from what the scheduler decided and the executor answered; it reads no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from shared.messages import FinishReason

ERROR = "error"  # the end of a request that has no FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheStats:
    """Blocks on the device by state; free + cached + active == num_blocks, which leaves out block 0, the padding."""

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_active_blocks: int
    num_wasted_slots: int  # internal waste: slots of active blocks that hold no computed token (yet)
    sharing_ratio: float  # blocks saved by sharing: 1 - active blocks / entries in all block tables

    @property
    def num_available_blocks(self) -> int:
        """What new content can have: free blocks, and cached ones by evicting them."""
        return self.num_free_blocks + self.num_cached_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def usage_ratio(self) -> float:
        return self.num_active_blocks / self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One engine step. Phases: schedule, apply (the engine's), and those of the executor: prepare, forward, sample."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was built."""

    steps: int
    computed_tokens: int  # every token that went through the model, those computed again after a preemption too
    prompt_tokens_computed: int  # those of them that belong to prompts
    generated_tokens: int
    preemptions: Mapping[str, int]  # by mode: recompute, swap
    swapped_in_blocks: int
    swapped_out_blocks: int
    finished: Mapping[str, int]  # by reason: stop, length, cancelled, error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    kv_cache: KVCacheStats
    last_step: StepStats
    counters: EngineCounters


class StepRecorder:
    def __init__(self) -> None:
        self.last_step = StepStats()
        self._steps = self._computed = self._prompt_computed = self._generated = self._preemptions = 0
        self._finished = dict.fromkeys([*FinishReason, ERROR], 0)

    def record_preemptions(self, number: int) -> None:
        self._preemptions += number

    def record_no_step(self) -> None:
        """Requests may have ended, or a step begun that ends later; nothing was computed."""
        self.last_step = StepStats()

    def record_step(self, batch: ScheduledBatch, num_sampled_tokens: int, phase_seconds: Mapping[str, float]) -> None:
        self.last_step = StepStats(
            num_sequences=len(batch.sequences),
            num_tokens=batch.num_tokens,
            num_sampled_tokens=num_sampled_tokens,
            phase_seconds=phase_seconds,
        )
        self._steps += 1
        self._computed += batch.num_tokens
        self._prompt_computed += sum(map(_num_prompt_tokens, batch.sequences))
        self._generated += num_sampled_tokens

    def record_end(self, reason: str) -> None:
        self._finished[reason] += 1

    def counters(self) -> EngineCounters:
        return EngineCounters(
            steps=self._steps,
            computed_tokens=self._computed,
            prompt_tokens_computed=self._prompt_computed,
            generated_tokens=self._generated,
            preemptions={"recompute": self._preemptions, "swap": 0},
            swapped_in_blocks=0,
            swapped_out_blocks=0,
            finished={str(reason): count for reason, count in self._finished.items()},
        )


def _num_prompt_tokens(scheduled: ScheduledSequence) -> int:
    num_prompt = scheduled.sequence.num_prompt_tokens
    return min(scheduled.start + scheduled.num_new_tokens, num_prompt) - min(scheduled.start, num_prompt)
