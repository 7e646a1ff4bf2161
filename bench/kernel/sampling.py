"""Check sampling on a CUDA device against the reference, then time it.

    python -m bench sampling --out DIR

Prints a table and writes DIR/sampling.json; the exit status is 1 if a check failed. Times are those of the device: a
graph of many calls excludes the host's launches.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.sampling.cuda import sample_tokens_triton, sum_groups
from kernels.sampling.reference import SamplingRows, sample_tokens_reference

READ_CEILING_BYTES_PER_SECOND = 4.62e12  # measured on an H200: reads only
VOCABULARIES = (49_152, 128_256)
BATCHES = (1, 32, 256)
# Deviation of the logits: 1 is nearly flat, with a wide nucleus, like random weights; 4 is peaked like a trained model.
SCALES = (1.0, 4.0)
VARIANTS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def uniform_rows(
    num_rows: int,
    device: str = "cuda",
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> SamplingRows | None:
    """Return rows with the same parameters and distinct seeds; None for greedy rows."""
    if temperature == 0.0:
        return None
    everyone = torch.arange(num_rows, device=device)
    truncated = min_p > 0.0 or top_k > 0 or top_p < 1.0

    def all_rows(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64, device=device)

    return SamplingRows(
        seeds=everyone * 7919,
        indices=everyone % 11,
        temperature=all_rows(temperature),
        log_min_p=all_rows(math.log(min_p) if min_p > 0.0 else -math.inf),
        top_k=all_rows(top_k).long(),
        top_p=all_rows(top_p),
        random_rows=everyone,
        truncated_rows=everyone if truncated else everyone[:0],
    )


def random_scores(num_rows: int, vocab_size: int, scale: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (scale * torch.randn(num_rows, vocab_size, device="cuda", generator=generator)).to(dtype)


def num_kept(scores: Tensor, rows: SamplingRows, slack: float) -> Tensor:
    """Return the number of kept tokens by definition: sorted, in float64, with top-p changed by the ratio `slack`."""
    ordered = scores.double().sort(dim=-1, descending=True).values
    weights = ((ordered - ordered[:, :1]) / rows.temperature[:, None]).exp()
    kth = torch.where(rows.top_k > 0, rows.top_k, scores.shape[1])[:, None].clamp(max=scores.shape[1]) - 1
    left = (weights.log() >= rows.log_min_p[:, None]) & (ordered >= ordered.gather(1, kth))
    weights *= left
    before = weights.cumsum(dim=-1) - weights
    top_p = rows.top_p[:, None]
    left &= (top_p >= 1.0) | (before < (1.0 + slack) * top_p * weights.sum(dim=-1, keepdim=True))
    left[:, 0] = True
    least = ordered.masked_fill(~left, math.inf).amin(dim=-1, keepdim=True)
    return (ordered >= least).sum(dim=-1)


def check(
    vocab_size: int, scale: float, dtype: torch.dtype, variant: dict[str, Any], num_rows: int = 64
) -> dict[str, Any]:
    """Count rows whose token or kept set differs from the reference, or whose result changes between runs."""
    scores, rows = random_scores(num_rows, vocab_size, scale, dtype), uniform_rows(num_rows, **variant)
    token_ids, best = sample_tokens_triton(scores, rows)
    expected, expected_best = sample_tokens_reference(scores, rows)
    alone = torch.cat(
        [sample_tokens_triton(scores[row : row + 1], _row(rows, row))[0] for row in range(0, num_rows, 9)]
    )
    result = {
        "other_tokens": int((token_ids != expected).sum()),
        "other_best": int((best != expected_best).sum()),
        "other_alone": int((alone != token_ids[::9]).sum()),
        "other_sets": 0,
    }
    if rows is not None and rows.truncated_rows.shape[0]:
        kept = (scores.float() >= sum_groups(scores, rows).floors[:, None]).sum(dim=-1)
        # float32 sums of 1e5 weights are off by about 1e-6 of the mass, and so is the edge of such a wide nucleus.
        fewest, most = num_kept(scores, rows, -1e-5), num_kept(scores, rows, 1e-5)
        result |= {"other_sets": int(((kept < fewest) | (kept > most)).sum()), "most_kept": int(most.max())}
    # A near-tie may be decided differently, because float32 sums have another order: at most one row of 64.
    exact = not (result["other_best"] or result["other_alone"] or result["other_sets"])
    return result | {"passed": exact and result["other_tokens"] <= 1}


def _row(rows: SamplingRows | None, row: int) -> SamplingRows | None:
    if rows is None:
        return None
    fields = ("seeds", "indices", "temperature", "log_min_p", "top_k", "top_p")
    none = rows.truncated_rows[:0]
    only = torch.zeros(1, dtype=torch.int64, device=none.device)
    truncated = only if rows.truncated_rows.shape[0] else none
    values = {name: getattr(rows, name)[row : row + 1] for name in fields}
    return SamplingRows(**values, random_rows=only, truncated_rows=truncated)


def run_checks() -> list[dict[str, Any]]:
    variants = VARIANTS | {
        "temperature 0.3, top-p 0.99": {"temperature": 0.3, "top_p": 0.99},
        "temperature 5, top-k 3000, top-p 0.5": {"temperature": 5.0, "top_k": 3000, "top_p": 0.5},
        "min-p 0.2, top-k 40, top-p 0.7": {"min_p": 0.2, "top_k": 40, "top_p": 0.7},
        "temperature 1e-30": {"temperature": 1e-30},
        "top-p 0": {"top_p": 0.0},
    }
    results = []
    for vocab_size in (*VOCABULARIES, 1_000):
        for scale in SCALES:
            for dtype in (torch.bfloat16, torch.float32):
                for name, variant in variants.items():
                    case = f"{name}, {vocab_size}, scale {scale:g}, {str(dtype).removeprefix('torch.')}"
                    results.append({"case": case, **check(vocab_size, scale, dtype, variant)})
    return results


def device_seconds(call: Callable[[Tensor], object], buffers: list[Tensor], rounds: int = 20) -> float:
    """Return the median per call over replays of a graph with one call per buffer."""
    for buffer in buffers[:2]:
        call(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in buffers:
            call(buffer)
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(buffers))
    return sorted(times)[len(times) // 2]


def sorting_baseline(scores: Tensor) -> Tensor:
    """Compute top-k 50 and top-p 0.9 in plain torch, with a sort of the row."""
    ordered, order = scores.float().sort(dim=-1, descending=True)
    weights = ordered.softmax(dim=-1)
    weights[:, 50:] = 0.0
    weights *= (weights.cumsum(dim=-1) - weights) < 0.9 * weights.sum(dim=-1, keepdim=True)
    noise = torch.rand_like(weights).log_().neg_()
    return order.gather(1, (weights / noise).argmax(dim=-1, keepdim=True))


def time_variant(name: str, variant: dict[str, Any], num_rows: int, vocab_size: int, scale: float) -> dict[str, Any]:
    # Enough logits to fill the L2 cache, except for smaller batches, which a model has just written.
    buffers = [random_scores(num_rows, vocab_size, scale, torch.bfloat16, seed) for seed in range(8)]
    rows = uniform_rows(num_rows, **variant)
    seconds = device_seconds(lambda scores: sample_tokens_triton(scores, rows), buffers)
    read_bytes = buffers[0].nbytes
    return {
        "case": name,
        "rows": num_rows,
        "vocab": vocab_size,
        "scale": scale,
        "microseconds": seconds * 1e6,
        "read_floor_microseconds": read_bytes / READ_CEILING_BYTES_PER_SECOND * 1e6,
    }


def run_timings() -> list[dict[str, Any]]:
    timings = []
    for vocab_size in VOCABULARIES:
        for num_rows in BATCHES:
            for name, variant in VARIANTS.items():
                # Without truncation the time does not depend on the scores.
                scales = SCALES if variant.keys() & {"top_p", "top_k", "min_p"} else SCALES[:1]
                timings += [time_variant(name, variant, num_rows, vocab_size, scale) for scale in scales]
            buffers = [random_scores(num_rows, vocab_size, 1.0, torch.bfloat16, seed) for seed in range(2)]
            seconds = device_seconds(sorting_baseline, buffers, rounds=5)
            shape = {"rows": num_rows, "vocab": vocab_size, "scale": 1.0}
            timings.append({"case": "torch, with a sort", **shape, "microseconds": seconds * 1e6})
    return timings


def print_results(checks: list[dict[str, Any]], timings: list[dict[str, Any]]) -> None:
    for result in checks:
        if not result["passed"] or result["other_tokens"] or result["other_sets"]:
            print(("" if result["passed"] else "FAILED ") + json.dumps(result))
    print(f"{sum(result['passed'] for result in checks)} of {len(checks)} checks passed")
    print(f"\n{'way':24s} {'rows':>5s} {'vocab':>7s} {'scale':>5s} {'us':>8s} {'read floor us':>14s}")
    for timing in timings:
        floor = timing.get("read_floor_microseconds", math.nan)
        print(
            f"{timing['case']:24s} {timing['rows']:5d} {timing['vocab']:7d} {timing['scale']:5g} "
            f"{timing['microseconds']:8.1f} {floor:14.1f}"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for sampling.json")
    options = parser.parse_args(argv)
    started = time.monotonic()
    checks, timings = run_checks(), run_timings()
    print_results(checks, timings)
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"{versions}, {time.monotonic() - started:.0f} s")
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"versions": versions, "checks": checks, "timings": timings}
    (options.out / "sampling.json").write_text(json.dumps(report, indent=1))
    return 0 if all(result["passed"] for result in checks) else 1
