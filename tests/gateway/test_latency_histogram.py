"""Compare with the client library's own histogram, including values equal to a bucket's bound."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from gateway.metrics import TOKEN_BUCKETS, LatencyHistogram


@pytest.mark.parametrize(
    ("bounds", "values"),
    [((0.001, 0.5, 1), (0.0, 0.001, 0.002, 0.5, 0.75, 1.0, 3.0)), (TOKEN_BUCKETS, (0, 1, 7, 50, 51, 10**6))],
)
def test_histogram_scrape_equals_the_client_library(bounds: tuple[float, ...], values: tuple[float, ...]) -> None:
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LatencyHistogram("waits_seconds", "Waits", bounds, ours)
    library = Histogram("waits_seconds", "Waits", buckets=bounds, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for value in values:
        histogram.observe(value)
        library.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
