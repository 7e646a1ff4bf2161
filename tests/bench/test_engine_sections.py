import random

from bench.engine_sections import Bench, pressure, trace
from bench.engine_session import EngineSession
from tests.builders import make_engine


def bench(lengths: list[tuple[int, int]], **config: int) -> Bench:
    session = EngineSession(make_engine(**config))
    return Bench(session=session, lengths=lengths, token_ids=range(3, 50), repeats=2, seed=random.Random(1))


def test_the_trace_is_run_greedily_as_often_as_asked_and_once_at_temperature_1() -> None:
    rows = list(trace(bench([(5, 3), (4, 2)])))
    assert [row["temperature"] for row in rows] == [0.0, 0.0, 1.0]
    assert [(row["requests"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [(2, 9, 5)] * 3


def test_pressure_counts_what_its_own_run_preempted() -> None:
    # 12 blocks of 4 tokens for two sequences of 28: one has to give way.
    first, second = pressure(bench([(8, 20), (8, 20)], num_blocks=13))
    assert first["output_tokens"] == second["output_tokens"] == 40
    assert sum(first["preemptions"].values()) == sum(second["preemptions"].values()) > 0
