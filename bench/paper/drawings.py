"""Draw each figure from its data: one function per figure, `draw(data, path)`."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.paper import plots

Data = dict[str, Any]


def figure_2(data: Data, path: Path) -> None:
    parts = ("tokens", "reserved", "internal", "external")

    def draw(axes: list[Axes]) -> None:
        names = [f"{policy}\n{side}" for policy in data["ours"] for side in ("paper", "ours")]
        values: dict[str, list[float]] = {part: [] for part in parts}
        for policy, ours in data["ours"].items():
            for part, paper in zip(parts, data["paper_percent"][policy], strict=True):
                values[part] += [paper or 0.0, ours[f"{part}_percent"]]
        plots.stacked_bars(axes[0], names, values, "KV slots, %")

    plots.save(path, draw)


def figure_12(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        for axis, (name, dataset) in zip(axes, data["datasets"].items(), strict=True):
            plots.latency_curves(axis, name, dataset["curves"], dataset["unloaded_seconds_per_token"])

    plots.save(path, draw, num_panels=len(data["datasets"]))


def figure_13(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        for axis, (name, rows) in zip(axes, data["sequences"].items(), strict=True):
            paper, ours = ([row[side] for row in rows.values()] for side in ("paper", "ours"))
            plots.grouped_bars(axis, list(rows), paper, ours, "batched requests")
            axis.set_title(f"{name}, {data['requests_per_second'][name]['rate']:g} requests/s", fontsize=9)

    plots.save(path, draw, num_panels=len(data["sequences"]))


def figure_14(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        for axis, (name, sweep) in zip(axes, data["groups"].items(), strict=True):
            plots.latency_curves(axis, f"Alpaca, {name}", sweep["curves"], sweep["unloaded_seconds_per_token"])

    plots.save(path, draw, num_panels=len(data["groups"]))


def figure_15(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        names = list(data["saved_blocks_percent"]["Alpaca"])
        paper = [data["paper_percent"]["Alpaca"][name] for name in names]
        plots.grouped_bars(
            axes[0], names, paper, list(data["saved_blocks_percent"]["Alpaca"].values()), "saved blocks, %"
        )
        axes[0].set_title("Alpaca", fontsize=9)
        axes[1].bar(names, list(data["saved_blocks_percent"]["ShareGPT"].values()), color=plots.OUR_COLOR)
        axes[1].set_title("ShareGPT (paper: parallel 16-31 %, beam 44-66 %)", fontsize=9)
        for axis in axes:
            axis.tick_params(axis="x", labelsize=6)

    plots.save(path, draw, num_panels=2)


def figure_16(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        for axis, (name, sweep) in zip(axes, data["prefixes"].items(), strict=True):
            plots.latency_curves(axis, f"WMT16, {name} prefix", sweep["curves"], sweep["unloaded_seconds_per_token"])

    plots.save(path, draw, num_panels=len(data["prefixes"]))


def figure_17(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        chat = data["chat"]
        plots.latency_curves(axes[0], "chat, last 1024 tokens", chat["curves"], chat["unloaded_seconds_per_token"])

    plots.save(path, draw)


def figure_18(data: Data, path: Path) -> None:
    kernel = {row["block_size"]: row["microseconds"] for row in data["decode_microseconds_by_block_size"]}

    def draw(axes: list[Axes]) -> None:
        rows = data["attention_microseconds"]
        names = [f"{row['model'].split('-')[0]}\n{row['sequences']}x{row['context']}" for row in rows]
        contiguous = [row["scattered"] / row["contiguous_sdpa"] for row in rows]
        plots.paired_bars(
            axes[0], names, {"against a table in order": [row["ratio"] for row in rows], "against SDPA": contiguous}
        )
        axes[0].set_ylabel("decode attention, scattered blocks, ratio")
        plots.lines(axes[1], {"32 x 1024, measured": kernel}, "block size", "decode attention, us")
        plots.lines(axes[2], data["seconds_per_token_by_block_size"], "block size", "normalized latency, s/token")

    plots.save(path, draw, num_panels=3)


def figure_19(data: Data, path: Path) -> None:
    def draw(axes: list[Axes]) -> None:
        for axis, (tokens, recompute) in zip(axes, data["recompute_milliseconds"].items(), strict=True):
            rows = [row for row in data["swap_milliseconds"] if row["tokens"] == int(tokens)]
            labels = {"pieces": "swap, one copy a layer", "blocks": "swap, one copy a block", "host_pool": "swap, ours"}
            series = {
                label: {row["block_size"]: row[f"{way}_out_ms"] + row[f"{way}_in_ms"] for row in rows}
                for way, label in labels.items()
            }
            series["recompute"] = dict.fromkeys((row["block_size"] for row in rows), recompute)
            plots.lines(axis, series, "block size", "ms out and in")
            axis.set_yscale("log")
            axis.set_title(f"{tokens} tokens", fontsize=9)

    plots.save(path, draw, num_panels=len(data["recompute_milliseconds"]))
