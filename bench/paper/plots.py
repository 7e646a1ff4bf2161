"""Draw the figures as PNG: bars for shares and counts, lines for latency against load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

mpl.use("Agg")  # no display

PAPER_COLOR, OUR_COLOR = "#b0b7c3", "#1f5fbf"
_LINE_STYLES = {"paged": "o-", "oracle": "s--", "pow2": "^--", "max": "v--"}


def save(path: Path, draw: Callable[[list[Axes]], None], num_panels: int = 1) -> None:
    figure, axes = pyplot.subplots(1, num_panels, figsize=(5.2 * num_panels, 3.4), squeeze=False)
    draw(list(axes[0]))
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def grouped_bars(axis: Axes, names: list[str], paper: list[float], ours: list[float], ylabel: str) -> None:
    """Draw the paper's value beside ours for each name, with labels."""
    for offset, values, label, color in ((-0.2, paper, "paper", PAPER_COLOR), (0.2, ours, "ours", OUR_COLOR)):
        bars = axis.bar([index + offset for index in range(len(names))], values, 0.4, label=label, color=color)
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel(ylabel)
    axis.legend()


def paired_bars(axis: Axes, names: list[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axis.bar([index + number * width for index in range(len(names))], values, width, label=label)
    axis.set_xticks([index + 0.4 - width / 2 for index in range(len(names))], names, fontsize=5)
    axis.axhline(1.0, color="grey", linewidth=0.6)
    axis.legend(fontsize=7)


def stacked_bars(axis: Axes, names: list[str], parts: dict[str, list[float]], ylabel: str) -> None:
    bottoms = [0.0] * len(names)
    for label, values in parts.items():
        axis.bar(names, values, bottom=bottoms, label=label)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axis.tick_params(axis="x", labelsize=7)
    axis.set_ylabel(ylabel)
    axis.legend(fontsize=7)


def latency_curves(axis: Axes, title: str, curves: dict[str, Any], unloaded_seconds: float) -> None:
    for name, curve in curves.items():
        rates, latencies = zip(*curve, strict=True)
        axis.plot(rates, latencies, _LINE_STYLES.get(name, ".-"), markersize=3, label=name)
    axis.set_ylim(0, 8 * unloaded_seconds)
    axis.axhline(2 * unloaded_seconds, color="grey", linewidth=0.6)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("normalized latency, s/token")
    axis.legend(fontsize=7)


def lines(axis: Axes, series: dict[str, dict[float, float]], xlabel: str, ylabel: str) -> None:
    """Draw each series over an axis of powers of two."""
    for name, points in series.items():
        axis.plot(list(points), list(points.values()), ".-", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.legend(fontsize=7)
