"""Requests of several sequences: blocks shared within a group, and the cost without groups."""

import pytest

from bench.paper.cost_model import StepCost
from bench.paper.figures_sharing import GROUPS, group_trace
from bench.paper.lengths import ALPACA, TimedRequest
from bench.paper.reservation import ReservationPolicy, make_manager
from bench.paper.simulation import SimulationResult, simulate

ONE_SECOND = StepCost("one second a step", 1.0, 0.0, 0.0, 0.0)


def run(policy: ReservationPolicy, request: TimedRequest) -> SimulationResult:
    """Simulate with 64 slots in blocks of 4 and a context of 32 tokens."""
    manager = make_manager(policy, num_slots=64, block_size=4, max_model_len=32)
    return simulate(manager, [request], cost=ONE_SECOND, max_model_len=32)


def test_group_stores_its_prompt_once() -> None:
    """Two choices of 8 + 3 tokens share 2 blocks in the first step, then each has one block of its own."""
    result = run(ReservationPolicy.PAGED, TimedRequest(0.0, 8, 3, num_sequences=2))
    assert result.saving.ratio == pytest.approx(1 - (2 + 4 + 4) / (4 + 6 + 6))
    assert result.normalized_latencies_seconds == [1.0]
    assert result.computed_tokens == 8 + 2 * 2


def test_ungrouped_sequences_are_separate_requests() -> None:
    """Each of the three requests reserves 16 slots: all run at once and share nothing."""
    request = TimedRequest(0.0, 8, 3, num_sequences=3)
    result = run(ReservationPolicy.ORACLE, request)
    assert result.saving.ratio == 0.0
    assert result.normalized_latencies_seconds == [1.0]
    assert result.computed_tokens == 3 * (8 + 2)
    waits = run(ReservationPolicy.MAX, request)  # two requests of 32 slots fit
    assert waits.normalized_latencies_seconds == [2.0]


def test_beams_share_more_than_choices() -> None:
    savings = {
        name: simulate(make_manager(ReservationPolicy.PAGED), group_trace(ALPACA, name, 5.0, 4.0)).saving.ratio
        for name in GROUPS
    }
    assert list(savings.values()) == sorted(savings.values())
    assert savings["beam 2"] > 3 * savings["parallel 2"]
