"""Draw the pictures of docs/benchmarks from the JSON of other benchmarks.

latency_throughput.png: time between tokens over tokens per second when decoding, one point per batch and one line per
engine; and through HTTP, time to first token and between tokens over requests per second. roofline.png: operations per
second over operations per byte of the kernels, with the measured ceilings.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench plots", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", nargs=2, action="append", default=[], metavar=("NAME", "JSONL"))
    parser.add_argument("--http", nargs=2, action="append", default=[], metavar=("NAME", "JSONL"))
    parser.add_argument("--kernels", metavar="PATH", type=Path, help="JSON of `bench kernels`")
    parser.add_argument("--out", metavar="PATH", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    engines = {name: read_rows(Path(path)) for name, path in options.engine}
    servers = {name: read_rows(Path(path)) for name, path in options.http}
    if engines or servers:
        draw_latency(engines, servers, options.out / "latency_throughput.png")
    if options.kernels:
        draw_roofline(json.loads(options.kernels.read_text(encoding="utf-8")), options.out / "roofline.png")
    return 0


def read_rows(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def decode_points(rows: Iterable[dict[str, Any]], prompt: int = 1024) -> list[tuple[int, float, float]]:
    """Return (batch, tokens per second, ms between tokens), by batch; the best of repeats."""
    best: dict[int, float] = {}
    for row in rows:
        if row["what"] == "decode_itl" and row["prompt"] == prompt and "mean_ms" in row:
            best[row["batch"]] = min(row["mean_ms"], best.get(row["batch"], float("inf")))
    return [(batch, 1e3 * batch / ms, ms) for batch, ms in sorted(best.items())]


def http_points(rows: Iterable[dict[str, Any]], latency: str) -> list[tuple[float, float, float]]:
    """Return (requests/s, p50 ms, p99 ms) by rate; unbounded loads are left out, because they measure the queue."""
    bounded = [row for row in rows if row["load"]["rate"] != "inf" and "requests_per_second" in row]
    values = [(row["requests_per_second"], row[f"{latency}_seconds"]) for row in bounded]
    return sorted((rate, 1e3 * each["p50"], 1e3 * each["p99"]) for rate, each in values)


def draw_latency(engines: dict[str, Rows], servers: dict[str, Rows], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, and a development dependency

    figure = Figure(figsize=(13, 4), layout="constrained")
    decode, first, between = figure.subplots(1, 3)
    for name, rows in engines.items():
        points = decode_points(rows)
        decode.plot([speed for _, speed, _ in points], [ms for _, _, ms in points], marker="o", label=name)
        for batch, speed, ms in points:
            decode.annotate(str(batch), (speed, ms), textcoords="offset points", xytext=(4, -10), fontsize=7)
    decode.set(xlabel="tokens per second", ylabel="ms between tokens", title="decode, prompts of 1024, by batch")
    for axes, latency, title in ((first, "time_to_first_token", "to the first token"), (between, "inter_token", "ITL")):
        for name, rows in servers.items():
            http = http_points(rows, latency)
            rates = [rate for rate, _, _ in http]
            (drawn,) = axes.plot(rates, [p50 for _, p50, _ in http], marker="o", label=f"{name}, p50")
            p99 = [value for _, _, value in http]
            axes.plot(rates, p99, marker="o", linestyle="--", color=drawn.get_color(), label=f"{name}, p99")
        axes.set(xlabel="requests per second through HTTP", ylabel="ms", title=title)
    for axes in (decode, first, between):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_roofline(kernels: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    read, peak = (kernels["ceilings"][f"{name}_per_second"] for name in ("read_bytes", "matmul_flops"))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    intensities = sorted([*(2.0**exponent for exponent in range(-3, 13)), peak / read])
    roof = [min(peak, read * intensity) / 1e12 for intensity in intensities]
    axes.plot(intensities, roof, color="black", label=f"{read / 1e12:.2f} TB/s, {peak / 1e12:.0f} TFLOP/s")
    groups: dict[str, Rows] = {}
    for row in kernels["kernels"]:
        groups.setdefault(row["group"], []).append(row)
    for name, rows in groups.items():
        x = [row["flops"] / row["bytes"] for row in rows]
        y = [row["flops"] / row["seconds"] / 1e12 for row in rows]
        axes.scatter(x, y, s=18, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
