"""Figures 14 and 15: several outputs per prompt, by parallel sampling or beam search, in one sequence group.

Orca has no sharing: there each sequence is a separate request, and copies of beams' KV are free in this simulation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bench.paper.knee import rising_rates
from bench.paper.lengths import ALPACA, SHAREGPT, Dataset, TimedRequest, poisson_trace
from bench.paper.reservation import ReservationPolicy, make_manager
from bench.paper.simulation import simulate, sweep_managers
from engine_worker.kv.kv_allocator import KVAllocator

GROUPS = {  # name: sequences, is beam search
    "parallel 2": (2, False),
    "parallel 4": (4, False),
    "parallel 6": (6, False),
    "beam 2": (2, True),
    "beam 4": (4, True),
    "beam 6": (6, True),
}
PAPER_FIGURE_14 = "the gain over Oracle grows from 1.3 times (basic) to 2.3 times (beam 6)"
PAPER_FIGURE_15_PERCENT: dict[str, Any] = {
    "Alpaca": {
        "parallel 2": 6.09, "parallel 4": 8.53, "parallel 6": 9.79, "beam 2": 37.56, "beam 4": 53.13, "beam 6": 55.16,
    },
    "ShareGPT": {"parallel 2 to 6": "16.2-30.5", "beam 2 to 6": "44.3-66.3"},
}  # fmt: skip
# Requests/s and simulated seconds of figure 15: busy, but with room for every group.
LIGHT_LOADS = ((ALPACA, 5.0, 60.0), (SHAREGPT, 0.15, 400.0))


def figure_14(scale: float) -> dict[str, Any]:
    managers: dict[str, Callable[[], KVAllocator]] = {
        policy: partial(make_manager, ReservationPolicy(policy)) for policy in ("oracle", "paged")
    }
    data = {
        name: sweep_managers(
            managers,
            lambda rate, name=name: group_trace(ALPACA, name, rate, 60.0 * scale),
            rising_rates(0.7, 40.0),
            reference="paged",
        )
        for name in ("basic", *GROUPS)
    }
    return {"groups": data, "paper": PAPER_FIGURE_14}


def figure_15(scale: float) -> dict[str, Any]:
    ours = {
        dataset.name: {
            name: round(
                100
                * simulate(
                    make_manager(ReservationPolicy.PAGED), group_trace(dataset, name, rate, duration_seconds * scale)
                ).saving.ratio,
                2,
            )
            for name in GROUPS
        }
        for dataset, rate, duration_seconds in LIGHT_LOADS
    }
    return {"saved_blocks_percent": ours, "paper_percent": PAPER_FIGURE_15_PERCENT}


def group_trace(dataset: Dataset, name: str, rate: float, duration_seconds: float) -> list[TimedRequest]:
    """Make a trace; `name` is one of GROUPS, or "basic" for one sequence per request."""
    num_sequences, is_beam_search = GROUPS.get(name, (1, False))
    return [
        replace(request, num_sequences=num_sequences, is_beam_search=is_beam_search)
        for request in poisson_trace(dataset.lengths(0), rate, duration_seconds)
    ]
