"""The gateway's Prometheus metrics: what a client sees. Touched by the shell only; labels are closed sets.

    metrics = GatewayMetrics()            # of the process: HTTP, the store
    metrics.of_model("name")              # of one served model; exposed with the label `model`
    generate_latest(metrics.exposed)

Steps, KV blocks and queue time within the engine are the worker's; names do not overlap.

Beside every walk, which it counts and times. It decides nothing, and knows no text and no key.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Protocol

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
from shared.vllm_metric_names import VllmNames


class LatencyHistogram(Collector):
    """A histogram for what happens once a token or several times a request: 0.3 us an observation, where the client
    library's own takes 1.5, and more in a high bucket. It is not thread-safe, unlike that one: the gateway observes and
    is scraped in one event loop."""

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
    """The metrics of several models as one collector: families of a name are joined, told apart by the label `model`.

    The label is added at a scrape, so that what happens once a token need not look for it. Families that have a
    `model_name` already, as vLLM's have, stay as they are.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[str, Collector]] = []

    def add(self, model: str, source: Collector) -> None:
        self._sources.append((model, source))

    def describe(self) -> list[Metric]:
        return []  # or the registry would collect at registration

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


# vLLM's, cut at 160 s
TTFT_BUCKETS_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
# From .001: a demo on two cores and an H200 lie a hundredfold apart.
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
    """The metrics of the process. `exposed` is what a scrape shows: these, and those of every model."""

    def __init__(self, registry: CollectorRegistry | None = None, *, vllm_names: bool = False) -> None:
        super().__init__(registry or _process_registry())
        self._vllm_names = vllm_names
        self._by_model = ByModel()
        self.exposed = CollectorRegistry()
        self.exposed.register(self.registry)
        self.exposed.register(self._by_model)
        self.http_duration = Histogram(
            "pagestream_http_request_duration_seconds",
            "Handling of an HTTP request, its whole stream included",
            ("route", "method", "code"),
            buckets=DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.open_requests = self._gauge("gateway_streams", "Inference requests being answered", ("route",))
        self.disconnects = self._counter("gateway_client_disconnects_total", "Clients gone before their answer's end")
        self.write_stalls = self._counter("gateway_write_stalls_total", "Clients dropped because they read nothing")
        self.batches = self._gauge("gateway_batches", "Batches that this gateway drives")
        self.batch_lines = self._counter(
            "gateway_batch_lines_total", "Lines of batches, when they have their result", ("result",)
        )
        self.files_bytes = self._gauge("gateway_files_bytes", "Of files and batches, with what they may grow to")
        self.files_limit = self._gauge("gateway_files_limit_bytes", "The most that they may have, of all keys together")
        for result in ("answered", "failed", "cancelled"):
            self.batch_lines.labels(result)  # there before the first, or its rate would not be seen
        self.owner_task_up = self._gauge(
            "owner_task_up", "0 if a task that runs as long as the gateway has failed; the process ends", ("task",)
        )
        self.handler_errors = self._counter("gateway_handler_errors_total", "Background work that failed")
        self.redis_up = self._gauge("redis_up", "1 if the store answered at the last scrape")
        self.store_memory = self._gauge("store_memory_used_ratio", "Of the store's maxmemory, or of its machine's")
        self.redis_duration = Histogram(
            "pagestream_redis_command_duration_seconds", "Until the reply of a command of the store, scripts included",
            ("command",), buckets=REDIS_BUCKETS_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._durations_of = cache(lambda command: self.redis_duration.labels(command.lower()))  # labels() takes 2 us
        self.redis_errors = self._counter("redis_errors_total", "Commands of the store that failed")

    def of_model(self, name: str) -> "ModelMetrics":
        metrics = ModelMetrics(CollectorRegistry())
        self._by_model.add(name, metrics.registry)
        if self._vllm_names:
            self._by_model.add(name, VllmNames(metrics.registry, name))
        return metrics

    def observe_redis(self, command: str, seconds: float, failed: bool) -> None:
        """`command` as the client sends it: one of the few that the gateway has."""
        self._durations_of(command).observe(seconds)
        if failed:
            self.redis_errors.inc()


class ModelMetrics(_Metrics):
    """The metrics of one served model. Its name is no label here: ByModel adds it at a scrape, no token pays for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._of_requests()
        self._of_queue()

    def _of_requests(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_BUCKETS_SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two arrivals of tokens of a choice", ITL_BUCKETS_SECONDS
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time per token of a choice after its first", ITL_BUCKETS_SECONDS
        )
        self.request_duration = self._histogram(
            "request_duration_seconds", "From a request's arrival to its last token", DURATION_BUCKETS_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of a choice", TOKEN_BUCKETS)
        self.choices_finished = self._counter(
            "gateway_choices_finished_total", "Choices that ended, as their clients saw it", ("reason",)
        )
        self.rejected = self._counter("requests_rejected_total", "Requests refused before acceptance", ("reason",))

    def _of_queue(self) -> None:
        self.queue_unfinished = self._gauge(
            "queue_unfinished", "Accepted requests that have not ended: what workers are needed for", _STREAM_LABEL
        )
        self.queue_depth = self._gauge("queue_depth", "Accepted requests that no worker has claimed", _STREAM_LABEL)
        self.queue_pending = self._gauge("queue_pending", "Requests claimed by a worker, not finished", _STREAM_LABEL)
        self.queue_oldest_age = self._gauge("queue_oldest_age_seconds", "Age of the oldest unclaimed request")
        self.dead_letters = self._gauge("dead_letters", "Requests that kept killing their workers")
        self.ready_workers = self._gauge("gateway_ready_workers", "Workers whose heartbeats say ready")


class Deliveries(Protocol):
    """The counts that an inference client keeps by itself."""

    @property
    def counts(self) -> DeliveryCounts: ...

    @property
    def streams(self) -> StreamTable: ...


class DeliveryCollector(Collector):
    """Reads the client's own counts at a scrape; nothing is done per token."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts, streams = self._deliveries.counts, self._deliveries.streams
        for name, documentation, value in (
            ("journal_reads", "Journals read: after a gap, a reconnect, or quiet", counts.num_journal_reads),
            ("bad_messages", "Messages of the store that were no frames", counts.num_bad_messages),
            ("pubsub_gaps", "Reconnects of the subscription, in which messages may be lost", counts.num_gaps),
            ("repeated_tokens", "Tokens that came more than once, and were left out", streams.num_repeated_tokens),
            (
                "message_errors",
                "Messages or streams that ended because their handler failed",
                counts.num_message_errors,
            ),
            ("torn_streams", "Streams whose lost tokens a worker made otherwise", counts.num_torn_streams),
            ("restored_requests", "Requests given back to a store that lost them", counts.num_restored_requests),
        ):
            yield CounterMetricFamily(f"pagestream_gateway_{name}", documentation, value=value)


def _process_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
