"""Figures 2, 12 and 13: what each reservation policy leaves for tokens, for the batch and for the load.

Figures 2 and 13 are averages over simulated time under the paper's load; figure 12 sweeps the rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.paper.knee import rising_rates
from bench.paper.lengths import ALPACA, SHAREGPT, Dataset, poisson_trace
from bench.paper.reservation import BLOCK_SIZE, NUM_SLOTS, ReservationPolicy, make_manager, make_swapping_manager
from bench.paper.simulation import SimulationResult, simulate, sweep_managers
from engine_worker.kv.kv_allocator import KVAllocator

PAPER_FIGURE_2 = {  # percent of the KV memory: tokens, reserved, internal, external
    "max": [20.4, 13.3, 57.3, 8.9],
    "pow2": [26.8, 17.9, 13.6, 41.6],
    "oracle": [38.2, 25.2, 0.0, 36.6],
    "paged": [96.3, None, None, None],
    "swapping": [96.3, None, None, None],
}
SWAPPING = "swapping"
PAPER_FIGURE_13 = {
    "ShareGPT": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "Alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
PAPER_FIGURE_12 = "ShareGPT: 1.7-2.7 times Oracle, 2.7-8 times Max"


@dataclass(frozen=True, slots=True)
class Load:
    """One data set of the paper: its rate in figure 13 and its rates in figure 12."""

    dataset: Dataset
    batch_rate: float  # requests/s
    saturating_rate: float  # beyond every policy's capacity, so that only memory limits the batch
    batch_duration_seconds: float
    sweep_rates: tuple[float, float]
    sweep_duration_seconds: float


LOADS = (
    Load(SHAREGPT, 2.0, 4.0, 1200, (0.1, 4.0), 900),
    Load(ALPACA, 30.0, 60.0, 180, (1.0, 60.0), 90),
)


def run_policy(
    policy: ReservationPolicy, load: Load, rate: float, duration_seconds: float, seed: int = 0
) -> SimulationResult:
    return run_manager(make_manager(policy, NUM_SLOTS, BLOCK_SIZE), load, rate, duration_seconds, seed)


def run_manager(
    manager: KVAllocator, load: Load, rate: float, duration_seconds: float, seed: int = 0
) -> SimulationResult:
    """Simulate until the last arrival, for averages under a load that may exceed the capacity."""
    trace = poisson_trace(load.dataset.lengths(seed), rate, duration_seconds, seed=seed)
    return simulate(manager, trace, drain=False)


def figure_2(scale: float) -> dict[str, Any]:
    """Simulate ShareGPT with more waiting requests than fit; `scale` shortens the simulated time."""
    load = LOADS[0]
    ours = {}
    for name, manager in _managers().items():
        result = run_manager(manager(), load, load.saturating_rate, load.batch_duration_seconds * scale)
        shares = result.occupancy.shares()
        ours[name] = {
            **{f"{part}_percent": round(100 * share, 1) for part, share in shares.items()},
            # Free blocks can be used by any sequence, so the waste within used blocks is reported, too.
            "tokens_percent_of_slots_in_use": round(
                100 * shares["tokens"] / (shares["tokens"] + shares["reserved"] + shares["internal"]), 1
            ),
        }
    return {"load": f"ShareGPT at {load.saturating_rate} requests/s", "ours": ours, "paper_percent": PAPER_FIGURE_2}


def figure_13(scale: float) -> dict[str, Any]:
    rows = {}
    for load in LOADS:
        rows[load.dataset.name] = {
            policy.value: {
                "paper": PAPER_FIGURE_13[load.dataset.name][policy.value],
                "ours": round(_mean_sequences(policy, load, load.batch_rate, scale), 2),
                "ours_saturated": round(_mean_sequences(policy, load, load.saturating_rate, scale), 2),
            }
            for policy in ReservationPolicy
        }
    rates = {load.dataset.name: {"rate": load.batch_rate, "saturated": load.saturating_rate} for load in LOADS}
    return {"requests_per_second": rates, "sequences": rows}


def figure_12(scale: float) -> dict[str, Any]:
    data = {
        load.dataset.name: sweep_managers(
            _managers(),
            lambda rate, load=load: poisson_trace(load.dataset.lengths(0), rate, load.sweep_duration_seconds * scale),
            rising_rates(*load.sweep_rates),
            reference="paged",
        )
        for load in LOADS
    }
    return {"datasets": data, "paper": PAPER_FIGURE_12}


def _managers() -> dict[str, Callable[[], KVAllocator]]:
    managers: dict[str, Callable[[], KVAllocator]] = {
        policy.value: partial(make_manager, policy, NUM_SLOTS, BLOCK_SIZE) for policy in ReservationPolicy
    }
    return managers | {SWAPPING: make_swapping_manager}


def _mean_sequences(policy: ReservationPolicy, load: Load, rate: float, scale: float) -> float:
    return run_policy(policy, load, rate, load.batch_duration_seconds * scale).occupancy.mean_sequences
