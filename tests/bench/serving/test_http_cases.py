"""Measure several HTTP servers in turn."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.serving.free_port import free_port
from bench.serving.http_cases import main, table
from tests.own_processes import running

FAKE = Path(__file__).with_name("fake_server.py")


def fake(name: str, missing_tokens: int = 0) -> list[str]:
    port = free_port()
    return ["--server", name, f"http://127.0.0.1:{port}/health", f"{sys.executable} {FAKE} {port} {missing_tokens}"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "trace.json").write_text("[[5, 3], [7, 2]]")
    load = ["--load", "inf:4,100:2", "--processes", "2", "--start-seconds", "60"]
    return ["--trace", str(tmp_path / "trace.json"), *load, "--out", str(tmp_path)]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_servers_alternate_and_are_stopped(tmp_path: Path, flags: list[str]) -> None:
    assert main([*flags, *fake("ours"), *fake("peer")]) == 0
    for name in ("ours", "peer"):
        first, second = rows(tmp_path / f"{name}.jsonl")
        assert (first["server"], first["requests"], first["prompt_tokens"], first["output_tokens"]) == (name, 4, 24, 10)
        assert (first["load"], second["load"]) == ({"rate": "inf"}, {"rate": "100.0"})
        assert first["events_per_token"] == 1.0
    assert running(str(FAKE)) == []


def test_failed_server_is_reported_and_skipped(tmp_path: Path, flags: list[str]) -> None:
    broken = ["--server", "broken", "http://127.0.0.1:9/health", f"{sys.executable} -c 1/0"]
    assert main([*flags, *broken, *fake("short", missing_tokens=1)]) == 1
    assert rows(tmp_path / "broken.jsonl") == []
    assert "ZeroDivisionError" in (tmp_path / "broken.log").read_text()
    assert [row["failed_requests"] for row in rows(tmp_path / "short.jsonl")] == [4, 2]


def test_table_lists_servers_under_each_other() -> None:
    times = {"p50": 0.010, "p99": 0.020}
    common: dict[str, Any] = {
        "requests": 4,
        "duration_seconds": 1.0,
        "requests_per_second": 4.0,
        "output_tokens_per_second": 8.0,
    }
    names = ("time_to_first_token", "inter_token", "time_per_output_token")
    common |= {"events_per_token": 1.0, **{f"{name}_seconds": times for name in names}}
    lines = table([
        {"server": "a", "load": {"rate": "inf"}, **common},
        {"server": "a", "load": {"rate": "10.0"}, "requests": 2, "failures": ["HTTP 503"]},
        {"server": "b", "load": {"rate": "inf"}, **common},
    ]).splitlines()  # fmt: skip
    assert [line.split()[:2] for line in lines[1:]] == [["a", "10.0"], ["a", "inf"], ["b", "inf"]]
    assert "all failed: ['HTTP 503']" in lines[1]
    assert " ".join(lines[3].split()) == "b inf x 4 4.00 8 10.0 / 20.0 10.0 / 20.0 10.0 / 20.0 1.000"
