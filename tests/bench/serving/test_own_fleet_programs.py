"""Run the delivery benchmarks that start their own fleet: small runs report their figures and leave no process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.serving import claim_balance, disconnects, gateway_load, overload

pytestmark = [pytest.mark.e2e, pytest.mark.long]  # the benchmarks start processes


@pytest.fixture
def measured(tmp_path: Path, demo_model_dir: Path) -> Callable[..., dict[str, Any]]:
    def run(program: Any, *flags: str) -> dict[str, Any]:
        path = tmp_path / "result.json"
        assert program.main(["--model", str(demo_model_dir), *flags, "--json", str(path)]) == 0
        return json.loads(path.read_text())

    return run


def test_every_stream_matches_its_journal(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured(gateway_load, "--streams", "20", "--seconds", "3")
    assert result["mismatches"] == [] and result["tokens_a_stream"] == 30
    assert 0 < result["delivery_seconds"]["p50"] < 5
    assert set(result["microseconds_of_cpu_a_token"]) == {"gateway 0", "worker", "store"}


def test_overload_is_refused_and_the_rest_answered(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured(overload, "--seconds", "3")
    statuses = {int(status): count for status, count in result["statuses"].items()}
    assert set(statuses) == {200, 503} and min(statuses.values()) > 20
    assert result["accepted_and_not_whole"] == [] and result["unanswered"] == []


def test_disconnected_clients_free_everything(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    log = ["--log-aborts", str(tmp_path / "aborts")]
    result = measured(disconnects, "--disconnects", "60", "--concurrency", "20", *log)
    assert result["found_in_the_log"] == result["of_requests_that_had_begun"] > 20
    assert (result["left_running"], result["left_waiting"], result["blocks_not_free"]) == (0, 0, 0)


def test_burst_is_shared_evenly_and_claims_are_cheap(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert claim_balance.main(["--workers", "2", "--burst", "60", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert sum(result["requests_by_worker"].values()) == 60 and result["most_over_mean"] <= 1.10
    costs = result["take_microseconds"]
    assert (
        costs["256 peers, 0 entries"] < 20 * costs["0 peers, 0 entries"]
    )  # the cost does not grow with the number of workers


def test_late_worker_gets_its_share_of_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert claim_balance.main(["--late-joiner", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["joiners_share"] >= 0.40
