"""Figures 16 and 17: requests with a shared prefix, and chat turns, against Orca's reservations in one pool.

The model is LLaMA-13B in the paper's figure 16 and OPT-13B in figure 17; here both have OPT-13B's memory and speed.
Figure 16 is also drawn with the speed of a current GPU, where a prompt costs more decode steps; the pool is the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.paper.cost_model import A100_OPT_13B, H200_LLAMA_8B
from bench.paper.knee import rising_rates
from bench.paper.lengths import SHAREGPT, TRANSLATION, chat_lengths, poisson_trace
from bench.paper.reservation import BLOCK_SIZE, NUM_SLOTS, ReservationPolicy, make_manager
from bench.paper.simulation import sweep_managers
from engine_worker.kv.kv_allocator import KVAllocator
from engine_worker.kv.kv_cache_manager import KVCacheManager

PREFIX_TOKENS = {"1-shot": 80, "5-shot": 341}
PAPER_FIGURE_16 = {"1-shot": 1.67, "5-shot": 3.58}  # times the rate of Orca (Oracle)
PAPER_FIGURE_17 = 2.0  # times the rate of each Orca policy
CHAT_WINDOW_TOKENS = 1024


def figure_16(scale: float) -> dict[str, Any]:
    managers: dict[str, Callable[[], KVAllocator]] = {
        "oracle": partial(make_manager, ReservationPolicy.ORACLE),
        "paged": partial(make_manager, ReservationPolicy.PAGED),
        "paged, shared prefix": partial(KVCacheManager, NUM_SLOTS // BLOCK_SIZE + 1, BLOCK_SIZE),
    }
    data = {}
    for cost, last_rate in ((A100_OPT_13B, 60.0), (H200_LLAMA_8B, 400.0)):
        for name, prefix_tokens in PREFIX_TOKENS.items():
            data[f"{name}, {cost.name}"] = sweep_managers(
                managers,
                lambda rate, prefix_tokens=prefix_tokens, duration=1500.0 / last_rate: poisson_trace(
                    TRANSLATION.lengths(0), rate, duration * scale, shared_prefix_tokens=prefix_tokens
                ),
                rising_rates(last_rate / 20, last_rate * 1.5),
                reference="paged, shared prefix",
                cost=cost,
            )
    return {"prefixes": data, "paper_over_oracle": PAPER_FIGURE_16}


def figure_17(scale: float) -> dict[str, Any]:
    data = sweep_managers(
        {policy.value: partial(make_manager, policy) for policy in ReservationPolicy},
        lambda rate: poisson_trace(chat_lengths(SHAREGPT, CHAT_WINDOW_TOKENS, seed=0), rate, 1200.0 * scale),
        rising_rates(0.1, 4.0),
        reference="paged",
    )
    return {"chat": data, "paper_over_each_orca": PAPER_FIGURE_17}
