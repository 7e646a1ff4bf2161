"""Sections of the engine benchmark on an engine without a device."""

import random
from typing import Any

from bench.engine.sections import Bench, beam, parallel, pressure, trace
from bench.engine.session import EngineSession
from tests.builders import make_engine


def bench(lengths: list[tuple[int, int]], **config: Any) -> Bench:
    session = EngineSession(make_engine(**config))
    return Bench(session=session, lengths=lengths, token_ids=range(3, 50), repeats=2, seed=random.Random(1))


def test_trace_runs_greedy_rounds_and_one_sampled_round() -> None:
    rows = list(trace(bench([(5, 3), (4, 2)])))
    assert [row["temperature"] for row in rows] == [0.0, 0.0, 1.0]
    assert [(row["requests"], row["prompt_tokens"], row["output_tokens"]) for row in rows] == [(2, 9, 5)] * 3


def test_four_choices_generate_four_times_the_tokens() -> None:
    four, one = parallel(bench([(5, 3), (4, 2)]))
    assert (four["what"], four["output_tokens"]) == ("parallel_n4_trace100", 20)
    assert (one["what"], one["output_tokens"]) == ("parallel_n1_trace100", 5)


def test_beam_search_returns_all_beams() -> None:
    (row,) = beam(bench([(5, 3), (4, 2)], num_blocks=400))
    assert (row["what"], row["requests"], row["output_tokens"]) == ("beam4_trace100_64tok", 2, 2 * 4 * 64)


def test_pressure_counts_its_own_preemptions() -> None:
    # 12 blocks of 4 tokens for two sequences of 28 tokens: one is preempted.
    first, second = pressure(bench([(8, 20), (8, 20)], num_blocks=13))
    assert first["output_tokens"] == second["output_tokens"] == 40
    assert first["preemptions"] == second["preemptions"] == {"recompute": 1, "swap": 0}
    assert first["computed_tokens"] == 2 * (8 + 20 - 1) + first["recomputed_tokens"]
    assert first["recomputed_ratio"] == round(first["recomputed_tokens"] / first["computed_tokens"], 5) > 0
    assert first["mean_sequences_a_step"] == round(40 / first["steps"], 1)
