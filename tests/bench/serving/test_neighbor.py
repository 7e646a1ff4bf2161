"""A small run beside patterns that differ the most; and the figures that make a miss."""

import argparse
import json
from pathlib import Path

import pytest

from bench.serving import neighbor
from bench.serving.hostile_patterns import PATTERNS


@pytest.mark.long
def test_polite_chats_are_whole_beside_hostile_ones(tmp_path: Path, demo_model_dir: Path) -> None:
    """How long they wait says nothing on a loaded machine: that bound is not asked for here."""
    path = tmp_path / "result.json"
    patterns = ("deep-json", "detached-streams", "slow-batches")
    asked = [flag for name in patterns for flag in ("--pattern", name)]
    limits = ["--max-ratio", "inf", "--max-livez-seconds", "inf"]
    # The hostile client has what others leave of the processors: on a busy machine nothing, for as long as chats take.
    small = ["--chats", "10", "--turns", "12", "--hostile-seconds", "100", *limits, "--json", str(path)]
    assert neighbor.main(["--model", str(demo_model_dir), *asked, *small]) == 0
    result = json.loads(path.read_text())["patterns"]
    assert tuple(result) == patterns
    for figures in result.values():
        assert figures["misses"] == [] and figures["p99_ratio"] > 0
        for side in ("alone", "beside"):
            assert (figures[side]["chats"], figures[side]["num_failed"]) == (10, 0)
            assert 0 < figures[side]["livez_worst_seconds"] < 60
    assert result["deep-json"]["hostile_answers"] == {"400": 12}
    assert result["slow-batches"]["hostile_answers"]["200"] > 2


def test_chats_are_whole_beside_a_key_that_takes_its_share(tmp_path: Path, demo_model_dir: Path) -> None:
    """Both loads run: that of honest keys, and that of the one key."""
    path = tmp_path / "result.json"
    limits = ["--max-ratio", "inf", "--max-livez-seconds", "inf", "--rest-seconds", "0"]
    small = ["--chats", "10", "--hostile-seconds", "4", *limits, "--json", str(path)]
    neighbor.main(["--model", str(demo_model_dir), "--pattern", "cancelled-body", *small])
    figures = json.loads(path.read_text())["patterns"]["cancelled-body"]
    for side in ("alone", "spread", "beside"):
        assert (figures[side]["chats"], figures[side]["num_failed"], figures[side]["num_503"]) == (10, 0, 0)
    assert figures["hostile_answers"]["200"] > 0
    assert figures["p99_ratio"] > 0


def test_there_are_nineteen_patterns() -> None:
    assert len(PATTERNS) == 19


def side(p99: float | None, num_failed: int, memory_bytes: int, livez: float = 0.01) -> dict[str, object]:
    return {
        "first_token_seconds": {} if p99 is None else {"p50": p99, "p99": p99},
        "num_failed": num_failed,
        "gateway_memory_bytes": memory_bytes,
        "livez_worst_seconds": livez,
    }


@pytest.mark.parametrize(
    ("ratio", "beside", "misses"),
    [
        (1.5, side(0.15, 0, 500), []),
        (1.6, side(0.16, 0, 500), ["the time to the first token"]),
        (None, side(None, 3, 500), ["the time to the first token", "tokens that did not come"]),
        (1.0, side(0.1, 0, 501), ["the gateway's memory"]),
        (1.0, side(0.1, 0, 500, 0.06), ["the wait for /livez"]),
    ],
)
def test_what_is_missed(ratio: float | None, beside: dict[str, object], misses: list[str]) -> None:
    options = argparse.Namespace(max_ratio=1.5, max_memory_bytes=500, max_livez_seconds=0.05)
    figures = {"p99_ratio": ratio, "alone": side(0.1, 0, 1), "beside": beside, "hostile_answers": {"400": 2}}
    assert neighbor.misses_of(options, figures, 0.05) == misses
    shown = neighbor.table({"deep-json": figures}).splitlines()
    assert len(shown) == 2 and "2 x 400" in shown[1]
