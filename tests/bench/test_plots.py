"""Plots of benchmark results."""

import json
from pathlib import Path
from typing import Any

from bench.plots import decode_points, http_points, main

DECODE: list[dict[str, Any]] = [
    {"what": "origin"},
    {"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": 5.0},
    {"what": "decode_itl", "batch": 1, "prompt": 1024, "mean_ms": 4.0},
    {"what": "decode_itl", "batch": 8, "prompt": 1024, "mean_ms": 4.0},
    {"what": "decode_itl", "batch": 16, "prompt": 16384, "mean_ms": 12.0},
]


def http_row(rate: str, requests_per_second: float) -> dict[str, Any]:
    times = {"p50": 0.005, "p99": 0.020}
    return {
        "load": {"rate": rate},
        "requests_per_second": requests_per_second,
        "inter_token_seconds": times,
        "time_to_first_token_seconds": times,
    }


HTTP = [http_row("30.0", 27.0), http_row("10.0", 9.5), http_row("inf", 55.0), {"load": {"rate": "5.0"}}]


def test_decode_points_are_the_best_repeat_per_batch() -> None:
    assert decode_points(DECODE) == [(1, 250.0, 4.0), (8, 2000.0, 4.0)]


def test_http_points_skip_entries_without_rate_or_result() -> None:
    assert http_points(HTTP, "inter_token") == [(9.5, 5.0, 20.0), (27.0, 5.0, 20.0)]


def test_plots_are_written(tmp_path: Path) -> None:
    for name, rows in (("engine", DECODE), ("http", HTTP)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kernel = {"group": "decode attention", "seconds": 1e-4, "bytes": 4e8, "flops": 2e9}
    ceilings = {"read_bytes_per_second": 4.6e12, "matmul_flops_per_second": 8e14}
    (tmp_path / "kernels.json").write_text(json.dumps({"ceilings": ceilings, "kernels": [kernel]}))
    files = ["--engine", "ours", str(tmp_path / "engine.jsonl"), "--http", "ours", str(tmp_path / "http.jsonl")]
    assert main([*files, "--kernels", str(tmp_path / "kernels.json"), "--out", str(tmp_path / "img")]) == 0
    pictures = [tmp_path / "img" / f"{name}.png" for name in ("latency_throughput", "roofline")]
    assert [picture.read_bytes()[:4] for picture in pictures] == [b"\x89PNG"] * 2
