"""The gateway's Prometheus metrics: what a client sees. Label values are closed sets.

    metrics = GatewayMetrics()            # of the process: HTTP, the store
    metrics.of_model("name")              # of one served model; exposed with the label `model`
    generate_latest(metrics.exposed)

Steps, KV blocks, and queue time within the engine are worker metrics; names do not overlap.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.store.stream_table import DeliveryCounts, StreamTable
from shared.messages import WorkerHeartbeat
from shared.redis_keys import PRIORITY_CLASSES
from shared.vllm_metric_names import HttpNames, VllmNames

# Reasons of `requests_rejected_total`. Each series begins at 0, so that an alert sees the first refusal as an increase.
REFUSALS = (
    "draining", "gateway_full", "key_share_exceeded", "needs_newer_worker", "no_worker", "queue_full",
    "queue_wait_exceeded", "starting",
    "store_full", "store_not_replicated", "store_share", "store_unavailable",
)  # fmt: skip


class LatencyHistogram(Collector):
    """A fast histogram for events per token: 0.3 us per observation; the client library takes 1.5 us or more.

    Not thread-safe: the gateway observes and is scraped in one event loop.
    """

    def __init__(
        self, name: str, documentation: str, upper_bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(upper_bounds)
        self._labels = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [0] * len(self._labels)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        buckets = list(zip(self._labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


LABEL = "model"
_OWN_LABEL = "model_name"


class ByModel(Collector):
    """The metrics of several models as one collector: families of one name are joined, with the label `model`.

    The label is added at the scrape, so that an observation per token needs no label lookup. Families with a
    `model_name` label, such as vLLM's, stay unchanged.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[str, Collector]] = []

    def add(self, model: str, source: Collector) -> None:
        self._sources.append((model, source))

    def describe(self) -> list[Metric]:
        return []  # without it the registry would collect at registration

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for model, source in self._sources:
            for family in source.collect():
                whole = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [
                    sample if _OWN_LABEL in sample.labels else sample._replace(labels={LABEL: model, **sample.labels})
                    for sample in family.samples
                ]
        yield from joined.values()


# vLLM's buckets, cut at 160 s.
TTFT_BUCKETS_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
# From 1 ms: a demo on two cores and an H200 differ by a factor of 100.
ITL_BUCKETS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
DURATION_BUCKETS_SECONDS = (
    0.005, 0.02, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
REDIS_BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 10)

_STREAM_LABEL = ("stream",)


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"pagestream_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"pagestream_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> LatencyHistogram:
        return LatencyHistogram(f"pagestream_{name}", documentation, buckets, self.registry)


class GatewayMetrics(_Metrics):
    """The metrics of the process. `exposed` contains these and the metrics of every model."""

    def __init__(self, registry: CollectorRegistry | None = None, *, vllm_names: bool = False) -> None:
        super().__init__(registry or _process_registry())
        self._vllm_names = vllm_names
        self._by_model = ByModel()
        self.exposed = CollectorRegistry()
        self.exposed.register(self.registry)
        self.exposed.register(self._by_model)
        self.http_duration = Histogram(
            "pagestream_http_request_duration_seconds",
            "Time to handle an HTTP request, including its whole stream",
            ("route", "method", "code"),
            buckets=DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.open_requests = self._gauge("gateway_streams", "Inference requests being answered", ("route",))
        self.disconnects = self._counter(
            "gateway_client_disconnects_total", "Clients that disconnected before the end of their answer"
        )
        self.write_stalls = self._counter(
            "gateway_write_stalls_total", "Clients disconnected because they read nothing for --write-stall-seconds"
        )
        self.open_batches = self._gauge("gateway_open_batches", "Batches of all API keys that have not ended")
        self.files_bytes = self._gauge(
            "gateway_files_bytes", "Bytes of files and batches, including the space reserved for their results"
        )
        self.files_limit = self._gauge("gateway_files_limit_bytes", "Limit of those bytes, of all API keys together")
        self.owner_task_up = self._gauge(
            "owner_task_up", "1 while a long-running task runs; 0 after its failure, which ends the process", ("task",)
        )
        self.handler_errors = self._counter("gateway_handler_errors_total", "Failed background tasks")
        self.redis_up = self._gauge("redis_up", "1 if the store answered at the last scrape")
        self.store_memory = self._gauge(
            "store_memory_used_ratio", "Used memory of the store / its maxmemory, or its machine's memory without one"
        )
        self.redis_duration = Histogram(
            "pagestream_redis_command_duration_seconds", "Time to the reply of a store command, including scripts",
            ("command",), buckets=REDIS_BUCKETS_SECONDS, registry=self.registry,
        )  # fmt: skip
        if vllm_names:
            self.exposed.register(HttpNames(self.http_duration))
        self._durations_of = cache(lambda command: self.redis_duration.labels(command.lower()))  # labels() takes 2 us
        self.redis_errors = self._counter("redis_errors_total", "Failed store commands")

    def of_model(self, name: str) -> "ModelMetrics":
        """Return new metrics for a served model."""
        metrics = ModelMetrics(CollectorRegistry())
        self._by_model.add(name, metrics.registry)
        if self._vllm_names:
            self._by_model.add(name, VllmNames(metrics.registry, name))
        return metrics

    def observe_redis(self, command: str, seconds: float, failed: bool) -> None:
        """Record a store command. `command`: its name as sent, from the closed set that the gateway uses."""
        self._durations_of(command).observe(seconds)
        if failed:
            self.redis_errors.inc()


class ModelMetrics(_Metrics):
    """The metrics of one served model, without the label of its name: ByModel adds it at the scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._of_requests()
        self._of_queue()

    def _of_requests(self) -> None:
        self.time_to_first_token = Histogram(
            "pagestream_time_to_first_token_seconds",
            "Time from a request's arrival to its first token",
            ("class",),
            buckets=TTFT_BUCKETS_SECONDS,
            registry=self.registry,
        )
        for priority_class in PRIORITY_CLASSES:
            self.time_to_first_token.labels(priority_class)
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two arrivals of tokens of a choice", ITL_BUCKETS_SECONDS
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time per token of a choice after its first", ITL_BUCKETS_SECONDS
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "Time from a request's arrival to its last token", DURATION_BUCKETS_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens per prompt", TOKEN_BUCKETS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens per choice", TOKEN_BUCKETS)
        self.choices_finished = self._counter(
            "gateway_choices_finished_total", "Choices that ended, by the reason sent to the client", ("reason",)
        )
        self.rejected = self._counter("requests_rejected_total", "Requests refused before acceptance", ("reason",))
        for reason in REFUSALS:
            self.rejected.labels(reason)

    def _of_queue(self) -> None:
        self.queue_unfinished = self._gauge(
            "queue_unfinished", "Accepted requests that have not ended; scale workers by it", _STREAM_LABEL
        )
        self.queue_depth = self._gauge("queue_depth", "Accepted requests that no worker has claimed", _STREAM_LABEL)
        self.queue_pending = self._gauge("queue_pending", "Claimed requests that have not ended", _STREAM_LABEL)
        self.queue_oldest_age = self._gauge(
            "queue_oldest_age_seconds", "Age of the oldest unclaimed request", _STREAM_LABEL
        )
        self.dead_letters = self._gauge("dead_letters", "Requests that exceeded the limit of worker crashes")
        self.ready_workers = self._gauge("gateway_ready_workers", "Workers that are ready and not stalled")
        self.fleet_requests = self._gauge(
            "fleet_requests", "Requests in each worker's engine by state, by its last heartbeat",
            ("worker", "state"),
        )  # fmt: skip
        self.fleet_kv_usage = self._gauge(
            "fleet_kv_usage_ratio",
            "Active KV blocks / capacity of each worker, by its last heartbeat",
            ("worker",),
        )

    def show_fleet(self, heartbeats: Iterable[WorkerHeartbeat]) -> None:
        """Replace the gauges of all workers."""
        self.fleet_requests.clear()
        self.fleet_kv_usage.clear()
        for beat in heartbeats:
            for state, count in {"running": beat.running, "waiting": beat.waiting}.items():
                self.fleet_requests.labels(beat.worker_id, state).set(count)
            if beat.kv_blocks_total:
                self.fleet_kv_usage.labels(beat.worker_id).set(1 - beat.kv_blocks_free / beat.kv_blocks_total)


class DeliveryCollector(Collector):
    """Reads the counts at a scrape, so that a token costs nothing here."""

    def __init__(self, counts: DeliveryCounts, streams: StreamTable) -> None:
        self._counts = counts
        self._streams = streams

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts, streams = self._counts, self._streams
        for name, documentation, value in (
            ("journal_reads", "Journal reads after a gap, a reconnect, or silence", counts.num_journal_reads),
            ("bad_messages", "Store messages that could not be decoded", counts.num_bad_messages),
            ("pubsub_gaps", "Reconnects of the subscription, which may lose messages", counts.num_gaps),
            ("repeated_tokens", "Tokens that arrived again and were dropped", streams.num_repeated_tokens),
            (
                "message_errors",
                "Messages or streams that ended because their handler failed",
                counts.num_message_errors,
            ),
            ("torn_streams", "Streams whose regenerated tokens differ from sent tokens", counts.num_torn_streams),
            ("restored_requests", "Requests restored to a store that lost them", counts.num_restored_requests),
        ):
            yield CounterMetricFamily(f"pagestream_gateway_{name}", documentation, value=value)


def _process_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
