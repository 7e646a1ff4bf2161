"""Report a load benchmark as table, JSON and picture; matplotlib is imported only to draw."""

import json
import sys
from pathlib import Path
from typing import Any

from bench.serving.load_summary import LATENCIES

Samples = dict[str, list[float]]
_SHORT = {"time_to_first_token": "TTFT", "time_per_output_token": "TPOT", "inter_token": "ITL", "end_to_end": "E2E"}


def tell(result: dict[str, Any], path: Path | None) -> None:
    """Print all figures, and write them to `path` if given."""
    text = json.dumps(result, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def table(runs: list[dict[str, Any]]) -> str:
    """Return one line per run; latencies in milliseconds, p50/p99."""
    header = ["load", "requests", "failed", "out tok/s", *(f"{_SHORT[name]} ms" for name in LATENCIES)]
    lines = [header, *(_row(run) for run in runs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _row(run: dict[str, Any]) -> list[str]:
    latencies = (run.get(f"{name}_seconds") or {} for name in LATENCIES)
    cells = (f"{1e3 * d['p50']:.1f}/{1e3 * d['p99']:.1f}" if d else "-" for d in latencies)
    throughput = run.get("output_tokens_per_second")
    rate = "-" if throughput is None else f"{throughput:.1f}"
    return [label(run["load"]), str(run["requests"]), str(run["failed_requests"]), rate, *cells]


def label(load: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in load.items())


def write_json(path: Path, origin: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**origin, "runs": runs}, indent=2) + "\n")


def write_png(path: Path, origin: dict[str, Any], runs: list[tuple[dict[str, Any], Samples]]) -> None:
    """Draw the distribution of each latency, one line per run."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, and a development dependency

    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, name in zip(figure.subplots(2, 2).flat, LATENCIES, strict=True):
        for run, samples in runs:
            ordered = sorted(samples[name])
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            axes.step([1e3 * value for value in ordered], shares, where="post", label=label(run["load"]))
        axes.set(xlabel=f"{name.replace('_', ' ')} [ms]", ylabel="share of measurements", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    rates = ", ".join(f"{label(run['load'])}: {run.get('output_tokens_per_second', 0):.0f} tok/s" for run, _ in runs)
    figure.suptitle(f"{origin['command']}\n{rates}", fontsize=9, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401, PLC0415 - checked before a run of minutes
    except ImportError:
        print("--png needs matplotlib: pip install 'pagestream[bench]'", file=sys.stderr)
        return False
    return True
