"""Metrics under vLLM's names in addition to ours, for tools that expect those (`--vllm-metric-names`).

Values are sums over the labels that vLLM does not have. Metrics whose meaning differs have no alias.
docs/reference/metrics.md contains the table below.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Alias:
    ours: str  # name in the client library: without pagestream_ and _total
    theirs: str  # without vllm:
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)  # label -> values to include
    labels: dict[str, str] = field(default_factory=dict)  # our label -> vLLM's; other labels are summed
    values: dict[str, str] = field(default_factory=dict)  # our value of these labels -> vLLM's
    constant: dict[str, str] = field(default_factory=dict)  # vLLM's label -> the only value that it can have here


ALIASES = (
    Alias("requests", "num_requests_running", only={"state": ("running",)}),
    Alias("requests", "num_requests_waiting", only={"state": ("waiting", "swapped")}),
    Alias("requests", "num_requests_waiting_by_reason", only={"state": ("waiting", "swapped")},
          constant={"reason": "capacity"}),
    Alias("fleet_requests", "num_requests_running", only={"state": ("running",)}, labels={"worker": "engine"}),
    Alias("fleet_requests", "num_requests_waiting", only={"state": ("waiting",)}, labels={"worker": "engine"}),
    Alias("queue_depth", "num_requests_waiting", only={"stream": ("all",)}, constant={"engine": "queue"}),
    Alias("kv_usage_ratio", "kv_cache_usage_perc"),
    Alias("fleet_kv_usage_ratio", "kv_cache_usage_perc", labels={"worker": "engine"}),
    Alias("worker_up", "engine_sleep_state", constant={"sleep_state": "awake"}),
    Alias("prefix_cache_queried_tokens", "prefix_cache_queries"),
    Alias("prefix_cache_hit_tokens", "prefix_cache_hits"),
    Alias("preemptions", "num_preemptions"),
    Alias("prompt_tokens", "prompt_tokens"),
    Alias("prompt_tokens", "prompt_tokens_cached", only={"source": ("cached",)}),
    Alias("prompt_tokens", "prompt_tokens_by_source", labels={"source": "source"},
          values={"computed": "local_compute", "cached": "local_cache_hit"}),
    Alias("prefix_cache_hit_tokens", "prompt_tokens_cached_by_source", labels={"device": "source"}),
    Alias("spec_decode_drafts", "spec_decode_num_drafts"),
    Alias("spec_decode_draft_tokens", "spec_decode_num_draft_tokens"),
    Alias("spec_decode_accepted_tokens", "spec_decode_num_accepted_tokens"),
    Alias("spec_decode_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", labels={"position": "position"}),
    Alias("generation_tokens", "generation_tokens"),
    Alias("requests_finished", "request_success", labels={"reason": "finished_reason"}),
    Alias("step_batch_tokens", "iteration_tokens_total"),
    Alias("request_queue_time_seconds", "request_queue_time_seconds"),
    Alias("request_prefill_time_seconds", "request_prefill_time_seconds"),
    Alias("request_decode_time_seconds", "request_decode_time_seconds"),
    Alias("time_to_first_token_seconds", "time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "inter_token_latency_seconds"),
    Alias("request_duration_seconds", "e2e_request_latency_seconds"),
    Alias("request_prompt_tokens", "request_prompt_tokens"),
    Alias("request_generation_tokens", "request_generation_tokens"),
    Alias("request_generation_tokens", "request_max_num_generation_tokens"),
    Alias("time_per_output_token_seconds", "request_time_per_output_token_seconds"),
)  # fmt: skip


_CACHE_SIZES = ("block_size_tokens", "capacity_blocks")


def with_vllm_names(registry: CollectorRegistry, model_name: str) -> CollectorRegistry:
    """Return a registry that contains all current and future metrics of `registry`, and the aliases."""
    both = CollectorRegistry()
    both.register(registry)
    both.register(VllmNames(registry, model_name))
    return both


class VllmNames(Collector):
    """Collector of the aliases, which reads `source` at each scrape."""

    def __init__(self, source: Collector, model_name: str) -> None:
        self._source = source
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return []  # or the registry would collect at registration

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._source.collect()}
        joined: dict[str, Metric] = {}
        for alias in ALIASES:
            if (family := families.get(f"pagestream_{alias.ours}")) is not None:
                theirs = self._renamed(family, alias)
                joined.setdefault(theirs.name, Metric(theirs.name, theirs.documentation, theirs.type))
                joined[theirs.name].samples += theirs.samples
        yield from joined.values()
        block_size, num_blocks = (families.get(f"pagestream_kv_{name}") for name in _CACHE_SIZES)
        if block_size is not None and num_blocks is not None:
            yield self._cache_config(block_size, num_blocks)

    def _renamed(self, family: Metric, alias: Alias) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            if all(sample.labels[label] in values for label, values in alias.only.items()):
                kept = [(theirs, alias.values.get(sample.labels[ours], sample.labels[ours]))
                        for ours, theirs in {**alias.labels, "le": "le"}.items() if ours in sample.labels]  # fmt: skip
                sums[sample.name.removeprefix(family.name), tuple(kept)] += sample.value
        theirs = Metric(f"vllm:{alias.theirs}", f"As vLLM calls it: {family.documentation}", family.type)
        fixed = {"model_name": self._model_name, "engine": "0", **alias.constant}
        for (suffix, labels), value in sums.items():
            theirs.add_sample(theirs.name + suffix, {**fixed, **dict(labels)}, value)
        return theirs

    def _cache_config(self, block_size: Metric, num_blocks: Metric) -> Metric:
        """Return the sizes of the KV cache as labels of a constant, as vLLM does."""
        info = Metric("vllm:cache_config_info", "As vLLM calls it: sizes of the KV cache", "gauge")
        sizes = {"block_size": block_size, "num_gpu_blocks": num_blocks}
        labels = {label: f"{family.samples[0].value:.0f}" for label, family in sizes.items()}
        info.add_sample(info.name, {"model_name": self._model_name, "engine": "0", **labels}, 1.0)
        return info


_HTTP_DURATION = "pagestream_http_request_duration_seconds"


class HttpNames(Collector):
    """Collector of what vLLM's HTTP server exports without a prefix: requests and their durations by handler."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        samples = [sample for family in self._source.collect() for sample in family.samples]
        requests: dict[tuple[str, str, str], float] = defaultdict(float)
        durations: dict[tuple[str, str, str, str], float] = defaultdict(float)
        for name, labels, value, *_ in samples:
            handler, method = labels["route"], labels["method"]
            durations[name.removeprefix(_HTTP_DURATION), handler, method, labels.get("le", "")] += value
            if name == f"{_HTTP_DURATION}_count":
                requests[handler, method, f"{labels['code'][0]}xx"] += value
        counter = Metric("http_requests", "As vLLM calls it: requests by class of status", "counter")
        for (handler, method, status), value in requests.items():
            counter.add_sample("http_requests_total", {"handler": handler, "method": method, "status": status}, value)
        histogram = Metric("http_request_duration_seconds", "As vLLM calls it: durations of requests", "histogram")
        for (suffix, handler, method, le), value in durations.items():
            labels = {"handler": handler, "method": method, **({"le": le} if le else {})}
            histogram.add_sample(histogram.name + suffix, labels, value)
        yield from (counter, histogram)
