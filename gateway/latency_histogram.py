"""A Prometheus histogram for what happens once a token: 0.3 us an observation; the client library's own takes 1.5.

Not thread-safe, unlike the library's: the gateway observes and is scraped in one event loop.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LatencyHistogram(Collector):
    def __init__(
        self, name: str, documentation: str, upper_bounds_seconds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(upper_bounds_seconds)
        self._labels = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [0] * len(self._labels)
        self._sum_seconds = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_seconds += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets = list(zip(self._labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum_seconds)
