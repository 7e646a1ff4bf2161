"""Summary figures of a load run."""

import pytest

from bench.serving.load_summary import summarize
from bench.serving.streaming_request import RequestResult
from bench.statistics import quantile


def result(sent_at: float, *event_times: float, tokens: int = 3, failure: str = "") -> RequestResult:
    return RequestResult(
        requested_tokens=tokens,
        sent_at=sent_at,
        event_times=list(event_times),
        prompt_tokens=10,
        completion_tokens=tokens,
        failure=failure,
    )


def test_quantile_is_the_smallest_covering_value() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert quantile([7.0], 0.5) == 7.0


def test_summary_of_two_requests() -> None:
    summary = summarize({"rate": 1.0}, [result(100.0, 101.0, 102.0, 104.0), result(101.0, 103.0, 104.0, 105.0)])
    assert summary["duration_seconds"] == 5.0
    assert summary["output_tokens_per_second"] == pytest.approx(6 / 5)
    assert summary["total_tokens_per_second"] == pytest.approx(26 / 5)
    assert summary["requests_per_second"] == pytest.approx(2 / 5)
    assert summary["time_to_first_token_seconds"] == {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
    assert summary["time_per_output_token_seconds"]["mean"] == pytest.approx((1.5 + 1.0) / 2)
    assert summary["inter_token_seconds"]["max"] == 2.0
    assert summary["end_to_end_seconds"]["mean"] == 4.0
    assert summary["events_per_token"] == 1.0
    assert (summary["requests"], summary["failed_requests"]) == (2, 0)


def test_failed_request_is_counted_but_not_measured() -> None:
    bad = result(100.0, 200.0, failure="HTTP 503")
    summary = summarize({"rate": 1.0}, [result(100.0, 101.0, 102.0, 104.0), bad])
    assert summary["output_tokens"] == 3
    assert summary["duration_seconds"] == 4.0
    assert (summary["failed_requests"], summary["failures"]) == (1, ["HTTP 503"])


def test_all_requests_failed_gives_no_figures() -> None:
    summary = summarize({"rate": 1.0}, [result(100.0, failure="x")])
    assert "output_tokens_per_second" not in summary
    assert summary["failed_requests"] == 1


def test_single_token_has_no_tpot() -> None:
    summary = summarize({"rate": 1.0}, [result(1.0, 2.0, tokens=1)])
    assert summary["time_per_output_token_seconds"] == {}
