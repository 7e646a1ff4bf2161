"""One run of the real engine and the real scheduler in simulated time: a step takes what the cost model says.

The executor computes nothing: it moves the clock and answers with a token. So a run of minutes takes seconds, is the
same on every machine, and differs between policies in nothing but the memory.
"""

from dataclasses import dataclass, field

from bench.paper.cost_model import StepCost
from bench.paper.lengths import TimedRequest
from bench.paper.occupancy import Occupancy
from engine_worker.engine import Engine
from engine_worker.scheduling.batch import FinishedStep, ScheduledBatch, StepResult
from engine_worker.scheduling.kv_cache_manager import KVCacheManager
from engine_worker.scheduling.scheduler import Scheduler, SchedulerConfig
from shared.messages import FinishEvent, GenerationRequest, SamplingParams

VOCAB_SIZE = 2**31 - 1  # token ids are request numbers here, so that no two prompts share a prefix by accident


@dataclass
class SimulatedExecutor:
    """Answers every batch at once and moves `now_seconds` by its cost; observes the batch before it is computed."""

    cost: StepCost
    occupancy: Occupancy
    now_seconds: float = 0.0

    def submit(self, batch: ScheduledBatch) -> FinishedStep:
        seconds = self.cost.seconds(batch)
        self.occupancy.add(batch, seconds)
        self.now_seconds += seconds
        return FinishedStep(StepResult([0 if scheduled.samples else None for scheduled in batch.sequences]))


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    normalized_latencies_seconds: list[float]  # of each finished request: arrival to last token, over output tokens
    occupancy: Occupancy
    num_preemptions: int
    simulated_seconds: float = 0.0
    num_requests: int = 0
    computed_tokens: int = 0

    @property
    def mean_normalized_latency_seconds(self) -> float:
        return sum(self.normalized_latencies_seconds) / len(self.normalized_latencies_seconds)


@dataclass(kw_only=True)
class Simulation:
    manager: KVCacheManager
    cost: StepCost
    max_model_len: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 2560  # vLLM's default in the paper's year
    requests: dict[str, TimedRequest] = field(default_factory=dict)

    def run(self, trace: list[TimedRequest], *, drain: bool = True) -> SimulationResult:
        """All of `trace`, in order of arrival. Without `drain` it ends at the last arrival, for averages under load."""
        occupancy = Occupancy(self.manager.num_usable_blocks * self.manager.block_size, self.manager.block_size)
        executor = SimulatedExecutor(self.cost, occupancy)
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
        request_id = str(number)
        self.requests[request_id] = request
        sampling = SamplingParams(max_tokens=request.output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        prompt = [number] * request.prompt_tokens
        engine.add_request(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))

    def _step(self, engine: Engine, executor: SimulatedExecutor) -> list[float]:
        latencies = []
        for event in engine.step():
            if isinstance(event, FinishEvent):
                request = self.requests.pop(event.request_id)
                latencies.append((executor.now_seconds - request.arrival_seconds) / request.output_tokens)
        return latencies
