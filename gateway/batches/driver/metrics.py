"""The metrics of a batch driver, beside those of every process that submits requests."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class DriverMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.batches = Gauge("pagestream_gateway_batches", "Batches that this driver runs", registry=registry)
        self.lines = Counter(
            "pagestream_gateway_batch_lines_total", "Batch lines that got a result", ("result",), registry=registry
        )
        for result in ("answered", "failed", "cancelled"):
            self.lines.labels(result)  # starts the series at 0, so that rate() includes the first increment
