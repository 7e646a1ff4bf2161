"""Small exact cases of the simulation: step costs, end times and slot occupancy."""

from itertools import islice

import pytest

from bench.paper.cost_model import StepCost
from bench.paper.figures_memory import LOADS, run_policy
from bench.paper.lengths import SHAREGPT, TimedRequest, poisson_trace
from bench.paper.reservation import ReservationPolicy, make_manager, make_swapping_manager
from bench.paper.simulation import SimulationResult, simulate
from engine_worker.kv.transfers import BlockCopy, Moves, Transfers
from engine_worker.scheduling.batch import ScheduledBatch, ScheduledSequence
from tests.builders import make_sequence

ONE_SECOND = StepCost("one second a step", 1.0, 0.0, 0.0, 0.0)


def run(policy: ReservationPolicy, *requests: TimedRequest, cost: StepCost = ONE_SECOND) -> SimulationResult:
    """Simulate with 64 slots in blocks of 4 and a context of 32 tokens."""
    manager = make_manager(policy, num_slots=64, block_size=4, max_model_len=32)
    return simulate(manager, list(requests), cost=cost, max_model_len=32)


def test_step_cost_counts_sequences_tokens_and_context() -> None:
    """A prompt of 3 tokens costs a step with 3 tokens and a context of 3, then one with 1 token and a context of 4."""
    cost = StepCost("priced", 1000.0, 100.0, 10.0, 1.0)
    result = run(ReservationPolicy.PAGED, TimedRequest(0.0, 3, 2), cost=cost)
    assert result.simulated_seconds == (1100 + 30 + 3) + (1100 + 10 + 4)
    assert result.normalized_latencies_seconds == [2247 / 2]


@pytest.mark.parametrize(("num_out", "num_in", "seconds"), [(3, 2, 7.0), (8, 2, 8.0), (2, 9, 9.0)])
def test_step_lasts_at_least_as_long_as_its_transfers(num_out: int, num_in: int, seconds: float) -> None:
    cost = StepCost("priced", 7.0, 0.0, 0.0, 0.0, per_swapped_block_seconds=1.0)
    transfers = Transfers(Moves([BlockCopy(1, 1)] * num_out, [BlockCopy(1, 1)] * num_in))
    scheduled = [ScheduledSequence(make_sequence(3), 0, 3, samples=True)]
    assert cost.seconds(ScheduledBatch(scheduled, transfers)) == seconds
    assert cost.seconds(ScheduledBatch([], transfers)) == max(num_out, num_in)


def test_swapping_recomputes_nothing() -> None:
    requests = [TimedRequest(0.0, 6, 20)] * 3  # 26 slots each; the pool has 64
    swapping = simulate(make_swapping_manager(num_slots=64, block_size=4), requests, cost=ONE_SECOND, max_model_len=32)
    recomputing = run(ReservationPolicy.PAGED, *requests)
    assert swapping.num_preemptions > 0 and recomputing.num_preemptions > 0
    assert swapping.computed_tokens == 3 * 25 < recomputing.computed_tokens


def test_latency_counts_from_the_arrival() -> None:
    result = run(ReservationPolicy.PAGED, TimedRequest(10.0, 3, 4), TimedRequest(11.5, 3, 2))
    assert result.simulated_seconds == 14.0
    assert result.normalized_latencies_seconds == [4.0 / 4, 2.5 / 2]  # the second request waits for the current step


def test_max_policy_batches_what_it_can_reserve() -> None:
    requests = [TimedRequest(0.0, 4, 4)] * 3
    assert run(ReservationPolicy.MAX, *requests).normalized_latencies_seconds == [1.0, 1.0, 2.0]
    assert run(ReservationPolicy.PAGED, *requests).normalized_latencies_seconds == [1.0, 1.0, 1.0]


def test_every_kv_slot_is_accounted_for() -> None:
    """One request of 6 + 3 tokens takes three steps, which hold 6, 7 and 8 computed tokens."""
    request = TimedRequest(0.0, 6, 3)
    shares = run(ReservationPolicy.MAX, request).occupancy.shares()
    tokens, reserved = 7 / 64, 2 / 64
    assert shares == pytest.approx({"tokens": tokens, "reserved": reserved, "internal": 23 / 64, "external": 0.5})
    shares = run(ReservationPolicy.PAGED, request).occupancy.shares()  # two blocks: 8 slots in every step
    assert shares == pytest.approx({"tokens": tokens, "reserved": 1 / 64, "internal": 0.0, "external": 56 / 64})


def test_lengths_have_the_means_of_the_paper() -> None:
    prompts, outputs = zip(*islice(SHAREGPT.lengths(seed=0), 100_000), strict=True)
    assert sum(prompts) / len(prompts) == pytest.approx(161.31, rel=0.01)
    assert sum(outputs) / len(outputs) == pytest.approx(337.99, rel=0.01)
    assert max(prompt + output for prompt, output in zip(prompts, outputs, strict=True)) <= 2048


def test_rate_scales_only_the_gaps() -> None:
    slow, fast = (poisson_trace(SHAREGPT.lengths(0), rate, 100.0 / rate) for rate in (1.0, 2.0))
    assert [(request.prompt_tokens, request.output_tokens) for request in slow] == [
        (request.prompt_tokens, request.output_tokens) for request in fast
    ]
    assert [request.arrival_seconds / 2 for request in slow] == [request.arrival_seconds for request in fast]
    assert 70 < len(slow) < 130


def test_policies_rank_as_in_the_paper() -> None:
    load = LOADS[0]
    batched = [
        run_policy(policy, load, load.saturating_rate, 60.0).occupancy.mean_sequences for policy in ReservationPolicy
    ]
    assert batched == sorted(batched)
    assert batched[0] == pytest.approx(7.0, abs=0.2)
    assert batched[3] > 2 * batched[2]
