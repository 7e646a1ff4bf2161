"""Run the real engine and scheduler in simulated time, with step durations from the cost model.

The executor only advances the clock and returns a token. A run of minutes takes seconds, is the same on every machine,
and differs between policies only in the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.paper.beams import beam_candidates
from bench.paper.cost_model import A100_OPT_13B, StepCost
from bench.paper.knee import summary, sweep
from bench.paper.lengths import TimedRequest
from bench.paper.occupancy import Occupancy, SharingSaving
from bench.paper.reservation import MAX_MODEL_LEN, ReservedKVAllocator
from engine_worker.engine import Engine
from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.scheduling.batch import FinishedStep, ScheduledBatch, StepResult
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.messages import FinishEvent, GenerationRequest, SamplingParams

VOCAB_SIZE = 2**31 - 1  # token ids are request numbers, so that prompts share only their declared prefix


@dataclass
class SimulatedExecutor:
    """Finishes every batch at once, advances `now_seconds` by its cost, and records the occupancy."""

    cost: StepCost
    occupancy: Occupancy
    saving: SharingSaving
    now_seconds: float = 0.0

    def submit(self, batch: ScheduledBatch) -> FinishedStep:
        seconds = self.cost.seconds(batch)
        self.now_seconds += seconds
        if not batch.sequences:  # only transfers
            return FinishedStep(StepResult([]))
        self.occupancy.add(batch, seconds)
        self.saving.add(batch, seconds)
        sampled = [[0] if scheduled.samples else None for scheduled in batch.sequences]
        return FinishedStep(StepResult(sampled, beam_candidates=beam_candidates(batch)))


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    normalized_latencies_seconds: list[float]  # per finished request: (last token - arrival) / output tokens
    occupancy: Occupancy
    saving: SharingSaving
    num_preemptions: int
    simulated_seconds: float = 0.0
    num_requests: int = 0
    computed_tokens: int = 0

    @property
    def mean_normalized_latency_seconds(self) -> float:
        return sum(self.normalized_latencies_seconds) / len(self.normalized_latencies_seconds)


def simulate(
    manager: KVAllocator,
    trace: list[TimedRequest],
    *,
    drain: bool = True,
    cost: StepCost = A100_OPT_13B,
    max_model_len: int = MAX_MODEL_LEN,
) -> SimulationResult:
    """Run `trace` in order of arrival; without `drain` it ends at the last arrival, for averages under load.

    With contiguous reservations, each sequence of a request becomes a separate request.
    """
    split = isinstance(manager, ReservedKVAllocator)
    return _Simulation(manager=manager, cost=cost, max_model_len=max_model_len, split_groups=split).run(
        trace, drain=drain
    )


def sweep_managers(
    managers: dict[str, Callable[[], KVAllocator]],
    trace_at: Callable[[float], list[TimedRequest]],
    rates: list[float],
    reference: str,
    cost: StepCost = A100_OPT_13B,
) -> dict[str, Any]:
    """Return latency against load per manager, and the sustained rate of `reference` over each other one."""

    def latency_seconds(name: str, rate: float) -> float:
        return simulate(managers[name](), trace_at(rate), cost=cost).mean_normalized_latency_seconds

    unloaded = latency_seconds(reference, rates[0])
    curves = {name: sweep(rates, partial(latency_seconds, name), unloaded) for name in managers}
    return {
        "unloaded_seconds_per_token": round(unloaded, 5),
        **summary(curves, unloaded, reference),
        "curves": {
            name: [(round(rate, 3), round(latency, 4)) for rate, latency in curve] for name, curve in curves.items()
        },
    }


@dataclass(kw_only=True)
class _Simulation:
    manager: KVAllocator
    cost: StepCost
    max_model_len: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 2560  # vLLM's default at the time of the paper
    split_groups: bool = False
    requests: dict[int, TimedRequest] = field(default_factory=dict)
    num_open: dict[int, int] = field(default_factory=dict)

    def run(self, trace: list[TimedRequest], *, drain: bool) -> SimulationResult:
        occupancy = Occupancy(self.manager.num_usable_blocks * self.manager.block_size, self.manager.block_size)
        saving = SharingSaving()
        executor = SimulatedExecutor(self.cost, occupancy, saving)
        engine = self._engine(executor)
        latencies: list[float] = []
        next_arrival = 0
        while engine.has_work or next_arrival < len(trace):
            if not engine.has_work:
                executor.now_seconds = max(executor.now_seconds, trace[next_arrival].arrival_seconds)
            while next_arrival < len(trace) and trace[next_arrival].arrival_seconds <= executor.now_seconds:
                self._add(engine, trace[next_arrival], next_arrival)
                next_arrival += 1
            if not drain and next_arrival == len(trace):
                break
            latencies += self._step(engine, executor)
        counters = engine.stats().counters
        return SimulationResult(
            normalized_latencies_seconds=latencies,
            occupancy=occupancy,
            saving=saving,
            num_preemptions=sum(counters.preemptions.values()),
            simulated_seconds=executor.now_seconds,
            num_requests=len(trace),
            computed_tokens=counters.computed_tokens,
        )

    def _engine(self, executor: SimulatedExecutor) -> Engine:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        scheduler = Scheduler(config, self.manager)
        return Engine(scheduler, executor, eos_token_ids=(), vocab_size=VOCAB_SIZE, clock=lambda: executor.now_seconds)

    def _add(self, engine: Engine, request: TimedRequest, number: int) -> None:
        """Add one request, or one per sequence for systems without sequence groups."""
        num_requests = request.num_sequences if self.split_groups else 1
        self.requests[number] = request
        self.num_open[number] = num_requests
        shared = request.shared_prefix_tokens
        prompt = [0] * shared + [number + 1] * (request.prompt_tokens - shared)
        for index in range(num_requests):
            engine.add_request(
                GenerationRequest(
                    request_id=f"{number}/{index}", prompt_token_ids=prompt, sampling=self._sampling(request)
                )
            )

    def _sampling(self, request: TimedRequest) -> SamplingParams:
        common: dict[str, Any] = {
            "max_tokens": request.output_tokens,
            "seed": 0,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if self.split_groups:
            return SamplingParams(**common)
        if request.is_beam_search:
            return SamplingParams(**common, use_beam_search=True, beam_width=request.num_sequences)
        return SamplingParams(**common, n=request.num_sequences)

    def _step(self, engine: Engine, executor: SimulatedExecutor) -> list[float]:
        """Return the latencies of requests that end, from arrival to the last token of the last sequence."""
        latencies = []
        for event in engine.step():
            if isinstance(event, FinishEvent):
                number = int(event.request_id.split("/")[0])
                self.num_open[number] -= 1
                if self.num_open[number] == 0:
                    request = self.requests.pop(number)
                    latencies.append((executor.now_seconds - request.arrival_seconds) / request.output_tokens)
        return latencies
