"""Compare the figures of two engines, case by case."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
_Case = tuple[str, Callable[[Row], bool], str, bool]  # name, matching rows, figure, whether more is better


def comparison(ours: Iterable[Row], peer: Iterable[Row]) -> str:
    """Return one line per case: the medians, the ratio ours / peer, and every figure of ours."""
    ours, peer = list(ours), list(peer)
    lines = [f"{'case':34} {'ours':>10} {'peer':>10} {'ratio':>7}  each of ours"]
    for name, matches, figure, more_is_better in _cases():
        mine, theirs = (_figures(rows, matches, figure) for rows in (ours, peer))
        if not mine:
            continue
        median = statistics.median(mine)
        reference = statistics.median(theirs) if theirs else None
        beside = f"{reference:10.2f} {median / reference:7.3f}" if reference else f"{'-':>10} {'-':>7}"
        arrow = "more" if more_is_better else "less"
        lines.append(f"{name:34} {median:10.2f} {beside}  {' '.join(f'{x:.2f}' for x in mine)}  ({arrow} is better)")
    return "\n".join(lines)


def _figures(rows: list[Row], matches: Callable[[Row], bool], figure: str) -> list[float]:
    return [float(row[figure]) for row in rows if matches(row) and figure in row]


def _cases() -> list[_Case]:
    decode = [(1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (16, 16384)]
    cases: list[_Case] = [
        (f"decode ITL ms {batch} x {prompt}", _is("decode_itl", batch=batch, prompt=prompt), "mean_ms", False)
        for batch, prompt in decode
    ]
    cases += [
        (f"prefill TTFT ms {prompt}", _is("prefill_ttft", prompt=prompt), "median_ms", False)
        for prompt in (8192, 32768)
    ]
    throughputs = {
        "trace, greedy": _is("throughput_trace", temperature=0.0),
        "trace, temperature 1": _is("throughput_trace", temperature=1.0),
        "shared prefix": _is("shared_prefix_1024+64->64"),
        "nothing shared": _is("no_shared_prefix_1088->64"),
        "n = 4": _is("parallel_n4_trace100"),
        "n = 1": _is("parallel_n1_trace100"),
        "beam 4 x 64": _is("beam4_trace100_64tok"),
        "KV of 20,480 tokens": _is("kv_pressure_trace"),
    }
    cases += [(f"req/s {name}", matches, "req_s", True) for name, matches in throughputs.items()]
    cases += [(f"start s, {part}", _is("engine_start"), figure, False) for part, figure in _START.items()]
    cases += [
        (f"device idle us a step, batch {batch}", _is("profile_decode", batch=batch), "idle_us_a_step", False)
        for batch in (1, 32, 256)
    ]
    return cases


_START = {"imports": "import_s", "engine": "engine_s"}


def _is(what: str, **values: Any) -> Callable[[Row], bool]:
    return lambda row: row["what"] == what and all(row.get(name) == value for name, value in values.items())
