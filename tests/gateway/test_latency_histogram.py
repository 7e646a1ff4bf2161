"""The same figures as the client library's own histogram, at the bounds themselves too."""

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from gateway.metrics import LatencyHistogram


def test_it_is_scraped_as_the_librarys_own() -> None:
    disable_created_metrics()
    bounds = (0.001, 0.5, 1)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LatencyHistogram("waits_seconds", "Waits", bounds, ours)
    library = Histogram("waits_seconds", "Waits", buckets=bounds, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for seconds in (0.0, 0.001, 0.002, 0.5, 0.75, 1.0, 3.0):
        histogram.observe(seconds)
        library.observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)
