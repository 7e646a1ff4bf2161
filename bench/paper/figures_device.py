"""Figures 18 and 19, block size and block transfers: results of bench/paper/device.py on an H200, with the paper's.

The second half of figure 18b is simulated: how latency depends on the block size when only memory matters, because
large blocks waste more of their last slots.
"""

import json
from pathlib import Path
from typing import Any

from bench.paper.cost_model import H200_LLAMA_8B
from bench.paper.lengths import ALPACA, SHAREGPT, poisson_trace
from bench.paper.reservation import ReservationPolicy, make_manager
from bench.paper.simulation import simulate

MEASURED = Path(__file__).with_name("measured_on_h200.json")
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PAPER_FIGURE_18A = "20-26 % slower than a kernel on contiguous KV, 8 and 32 sequences, 64 to 256 tokens"
PAPER_FIGURE_18B = {"ShareGPT": "16 to 128 best", "Alpaca": "16 to 32 best"}
PAPER_FIGURE_19 = "swapping is slow with small blocks (up to 140 ms); recomputing is flat, never 20 % above swapping"
NEAR_THE_KNEE = ((SHAREGPT, 1.8, 600.0), (ALPACA, 25.0, 90.0))  # data set, requests/s, simulated seconds


def figure_18(scale: float) -> dict[str, Any]:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    latencies = {
        dataset.name: {
            size: round(
                simulate(
                    make_manager(ReservationPolicy.PAGED, block_size=size),
                    poisson_trace(dataset.lengths(0), rate, duration_seconds * scale),
                ).mean_normalized_latency_seconds,
                5,
            )
            for size in BLOCK_SIZES
        }
        for dataset, rate, duration_seconds in NEAR_THE_KNEE
    }
    return {
        "gpu": measured["gpu"],
        "attention_microseconds": measured["attention"],
        "paper_18a": PAPER_FIGURE_18A,
        "decode_microseconds_by_block_size": measured["block_size"],
        "seconds_per_token_by_block_size": latencies,
        "rates": {dataset.name: rate for dataset, rate, _ in NEAR_THE_KNEE},
        "paper_18b": PAPER_FIGURE_18B,
    }


def figure_19(scale: float) -> dict[str, Any]:
    del scale  # nothing here is simulated
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    tokens = sorted({case["tokens"] for case in measured["swap"]})
    return {
        "gpu": measured["gpu"],
        "swap_milliseconds": measured["swap"],
        "recompute_milliseconds": {
            count: round(max(H200_LLAMA_8B.fixed_seconds, count * H200_LLAMA_8B.per_token_seconds) * 1e3, 2)
            for count in tokens
        },
        "paper": PAPER_FIGURE_19,
    }
