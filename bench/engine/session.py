"""One engine under a benchmark: requests in, and when each step gave how many tokens.

    session = EngineSession(engine)
    log = session.run([(prompt, sampling), ...])
    log.steady_step_seconds(batch)     # decode: the mean of the steps in which every sequence gave a token

All requests of a run are added before its first step. Knows the Engine alone, no device: `each_step` is for profilers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine_worker.engine import Engine, EngineStats
from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, TokenEvent

# Cut off a run of full steps: its first ones still share the device with the end of the prefill.
_UNSTEADY_STEPS_BEFORE, _UNSTEADY_STEPS_AFTER = 8, 2

Load = Sequence[tuple[list[int], SamplingParams]]


class NoSteadyStep(RuntimeError):
    """No step of the runs was like the others, so that nothing can be told of one."""

    def __init__(self) -> None:
        super().__init__(
            f"no steady step was left to measure: the first {_UNSTEADY_STEPS_BEFORE} and the last "
            f"{_UNSTEADY_STEPS_AFTER} of those in which every sequence wrote a token are left out; let each write more "
            "tokens, or take a smaller batch"
        )


class RequestFailed(RuntimeError):
    """The engine refused or lost a request of the benchmark."""


@dataclass(slots=True)
class RunLog:
    started_at: float
    ended_at: float = 0.0
    num_output_tokens: int = 0
    step_ends: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)  # beside step_ends

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def seconds_to_first_token(self) -> float:
        first = next(index for index, tokens in enumerate(self.step_tokens) if tokens)
        return self.step_ends[first] - self.started_at

    def steady_step_seconds(self, batch: int) -> list[float]:
        """The times of the longest run of consecutive steps with a token of every sequence, without its ends."""
        longest: list[float] = []
        current: list[float] = []
        for end, tokens in zip(self.step_ends, self.step_tokens, strict=True):
            current = [*current, end] if tokens == batch else []
            longest = max(longest, current, key=len)
        ends = longest[_UNSTEADY_STEPS_BEFORE : len(longest) - _UNSTEADY_STEPS_AFTER]
        return [after - before for before, after in pairwise(ends)]


class EngineSession:
    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._num_requests = 0

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def run(self, load: Load, each_step: Callable[[RunLog], None] = lambda log: None) -> RunLog:
        """Until every request has ended. Raises RequestFailed."""
        log = RunLog(self._clock())
        for prompt, sampling in load:
            self._num_requests += 1
            request_id = f"bench-{self._num_requests}"
            self._engine.add_request(
                GenerationRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
            )
        while self._engine.has_work:
            num_tokens = 0
            for event in self._engine.step():
                if isinstance(event, TokenEvent):
                    num_tokens += len(event.token_ids)
                elif isinstance(event, ErrorEvent):
                    raise RequestFailed(event.message)
            log.step_ends.append(self._clock())
            log.step_tokens.append(num_tokens)
            log.num_output_tokens += num_tokens
            each_step(log)
        log.ended_at = self._clock()
        return log


def step_figures(seconds: Sequence[float]) -> dict[str, float]:
    """Figures of at least one step. Raises NoSteadyStep."""
    if not seconds:
        raise NoSteadyStep
    ordered = sorted(seconds)
    return {
        "steps": len(ordered),
        "mean_ms": round(1e3 * statistics.fmean(ordered), 4),
        "p50_ms": round(1e3 * statistics.median(ordered), 4),
        "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 4),
    }
