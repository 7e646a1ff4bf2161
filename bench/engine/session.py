"""Run requests on one engine and record when each step produced how many tokens.

All requests of a run are added before its first step. `each_step` is for profilers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine_worker.engine import Engine, EngineStats
from shared.messages import ErrorEvent, GenerationRequest, SamplingParams, TokenEvent

# Dropped from a run of full steps: the first ones still share the device with the end of the prefill.
_UNSTEADY_STEPS_BEFORE, _UNSTEADY_STEPS_AFTER = 8, 2

Load = Sequence[tuple[list[int], SamplingParams]]


class NoSteadyStep(RuntimeError):
    """No run had a steady step to measure."""

    def __init__(self) -> None:
        super().__init__(
            f"no steady step to measure: the first {_UNSTEADY_STEPS_BEFORE} and the last "
            f"{_UNSTEADY_STEPS_AFTER} steps in which every sequence generated a token are dropped; generate more "
            "tokens, or use a smaller batch"
        )


class RequestFailed(RuntimeError):
    """The engine rejected or lost a request of the benchmark."""


@dataclass(slots=True)
class RunLog:
    started_at: float
    ended_at: float = 0.0
    num_output_tokens: int = 0
    step_ends: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)  # parallel to step_ends

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def seconds_to_first_token(self) -> float:
        first = next(index for index, tokens in enumerate(self.step_tokens) if tokens)
        return self.step_ends[first] - self.started_at

    def steady_step_seconds(self, batch: int) -> list[float]:
        """Return the durations of the longest run of steps with a token of every sequence, without its ends."""
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
        """Run until every request has ended.

        Raises:
            RequestFailed: If a request fails.
        """
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
    """Return mean, median and other figures of step durations.

    Raises:
        NoSteadyStep: If there are none.
    """
    if not seconds:
        raise NoSteadyStep
    ordered = sorted(seconds)
    return {
        "steps": len(ordered),
        "mean_ms": round(1e3 * statistics.fmean(ordered), 4),
        "p50_ms": round(1e3 * statistics.median(ordered), 4),
        "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 4),
    }
