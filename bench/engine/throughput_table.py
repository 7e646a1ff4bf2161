"""The table of `bench engine`: speeds of each side, and ours over the best peer's."""

import statistics
from typing import Any

Runs = list[dict[str, Any]]


def ratios(runs: Runs, ours: str) -> list[dict[str, Any]]:
    """Divide the median decode speed of each side named `ours...` by the best peer's, per concurrency."""
    found = []
    for side, concurrency in _cases(runs):
        peers = {name: _decode(runs, name, concurrency) for name, _ in _cases(runs) if not name.startswith(ours)}
        if side.startswith(ours) and peers:
            best = max(peers, key=lambda name: peers[name])
            ratio = round(_decode(runs, side, concurrency) / peers[best], 3)
            found.append({"side": side, "concurrency": concurrency, "ratio": ratio, "best_peer": best})
    return found


def print_table(runs: Runs, ttft: Runs, ttft_tokens: int, compared: Runs) -> None:
    print(f"\n{'side':22} {'C':>3} {'decode tok/s (each rep)':>40} {'e2e tok/s':>10}")
    for side, concurrency in _cases(runs):
        group = _group(runs, side, concurrency)
        decode = [run["decode_tokens_per_second"] for run in group]
        each = f"{statistics.median(decode):8.1f}  ({' '.join(f'{value:.0f}' for value in decode)})"
        e2e = statistics.median(run["e2e_tokens_per_second"] for run in group)
        print(f"{side:22} {concurrency:3} {each:>40} {e2e:10.1f}")
    for side in dict.fromkeys(row["side"] for row in ttft):
        seconds = statistics.median(row["seconds"] for row in ttft if row["side"] == side)
        print(f"{side:22} TTFT of {ttft_tokens} tokens: {seconds:.3f} s")
    for row in compared:
        print(f"{row['side']:22} {row['concurrency']:3}  {row['ratio']:.2f} of the best peer's, {row['best_peer']}")


def _cases(runs: Runs) -> list[tuple[str, int]]:
    return list(dict.fromkeys((run["side"], run["concurrency"]) for run in runs))


def _group(runs: Runs, side: str, concurrency: int) -> Runs:
    return [run for run in runs if (run["side"], run["concurrency"]) == (side, concurrency)]


def _decode(runs: Runs, side: str, concurrency: int) -> float:
    return statistics.median(run["decode_tokens_per_second"] for run in _group(runs, side, concurrency))
