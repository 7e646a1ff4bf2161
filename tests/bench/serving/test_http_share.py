"""Share of the engine's throughput that remains over HTTP."""

import pytest

from bench.serving.http_share import shares, table, wave_figures
from bench.serving.streaming_request import RequestResult


def stream(sent_at: float, *event_times: float) -> RequestResult:
    return RequestResult(
        requested_tokens=len(event_times),
        sent_at=sent_at,
        event_times=list(event_times),
        completion_tokens=len(event_times),
    )


def run(rep: int, side: str, e2e: float, decode: float, concurrency: int = 4) -> dict[str, float | str]:
    return {
        "rep": rep,
        "concurrency": concurrency,
        "side": side,
        "e2e_tokens_per_second": e2e,
        "decode_tokens_per_second": decode,
    }


def test_decode_counts_after_all_streams_have_started() -> None:
    figures = wave_figures([stream(10.0, 11.0, 12.0, 14.0), stream(10.5, 13.0, 14.0, 15.0)])
    assert figures == {
        "e2e_tokens_per_second": pytest.approx(6 / 5),  # 10.0 to 15.0
        "decode_tokens_per_second": pytest.approx(3 / 2),  # at 14, 14 and 15, after 13.0
        "seconds_to_first_tokens": pytest.approx(3.0),
    }


def test_share_is_the_median_over_repetitions() -> None:
    runs = [
        run(0, "engine", 100.0, 200.0), run(0, "http", 90.0, 190.0),
        run(1, "http", 50.0, 95.0), run(1, "engine", 50.0, 100.0),
        run(2, "engine", 100.0, 100.0), run(2, "http", 80.0, 80.0),
    ]  # fmt: skip
    (row,) = shares(runs)
    assert row["e2e_share_each"] == [0.9, 1.0, 0.8]
    # The ratio of the medians, 80 / 100, would differ.
    assert (row["engine_e2e"], row["http_e2e"], row["e2e_share"]) == (100.0, 80.0, 0.9)
    assert row["decode_share"] == 0.95


def test_table_has_one_line_per_concurrency() -> None:
    runs = [run(0, side, 10.0, 20.0, concurrency) for concurrency in (1, 16) for side in ("engine", "http")]
    assert [line.split()[0] for line in table(shares(runs)).splitlines()] == ["C", "1", "16"]
