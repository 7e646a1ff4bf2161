"""Engine sessions: runs, their logs and steady steps."""

from collections.abc import Iterator

import pytest

from bench.engine.session import EngineSession, NoSteadyStep, RequestFailed, RunLog, step_figures
from shared.messages import SamplingParams
from tests.builders import make_engine


def ticking() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 1.0


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)


def test_run_records_tokens_and_end_of_each_step() -> None:
    clock = ticking()
    session = EngineSession(make_engine(max_num_batched_tokens=8), clock=lambda: next(clock))
    log = session.run([([1, 2, 3, 4, 5, 6], greedy(3)), ([7, 8, 9], greedy(2))])
    # The first step holds 6 tokens of one prompt and 2 of the other, so the second sequence starts one step later.
    assert log.step_tokens == [1, 2, 2]
    assert log.step_ends == [1.0, 2.0, 3.0]
    assert (log.num_output_tokens, log.seconds, log.seconds_to_first_token) == (5, 4.0, 1.0)


def test_engine_session_runs_several_loads() -> None:
    session = EngineSession(make_engine())
    assert [session.run([([1, 2, 3], greedy(4))]).num_output_tokens for _ in range(2)] == [4, 4]


def test_refused_request_ends_the_run() -> None:
    with pytest.raises(RequestFailed):
        EngineSession(make_engine()).run([([10**6], greedy(4))])


def test_steady_steps_are_the_longest_full_stretch() -> None:
    tokens = [4, 4, 3, *[4] * 13, 1]
    log = RunLog(0.0, step_ends=[float(index**2) for index in range(len(tokens))], step_tokens=tokens)
    # The full stretch is steps 3 to 15; without its first eight and last two steps 11, 12 and 13 are left.
    assert log.steady_step_seconds(4) == [12.0**2 - 11**2, 13.0**2 - 12**2]
    assert log.steady_step_seconds(5) == []


def test_no_steady_step_is_an_error() -> None:
    with pytest.raises(NoSteadyStep, match=r"the first 8 and the last 2 steps .* generate more tokens"):
        step_figures([])


def test_figures_are_in_milliseconds() -> None:
    assert step_figures([0.001, 0.002, 0.006]) == {"steps": 3, "mean_ms": 3.0, "p50_ms": 2.0, "p99_ms": 2.0}
