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


ALIASES = (
    Alias("requests", "num_requests_running", only={"state": ("running",)}),
    Alias("requests", "num_requests_waiting", only={"state": ("waiting", "swapped")}),
    Alias("kv_usage_ratio", "kv_cache_usage_perc"),
    Alias("prefix_cache_queried_tokens", "prefix_cache_queries"),
    Alias("prefix_cache_hit_tokens", "prefix_cache_hits"),
    Alias("preemptions", "num_preemptions"),
    Alias("prompt_tokens", "prompt_tokens"),
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
)


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
        for alias in ALIASES:
            if (family := families.get(f"pagestream_{alias.ours}")) is not None:
                yield self._renamed(family, alias)

    def _renamed(self, family: Metric, alias: Alias) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            if all(sample.labels[label] in values for label, values in alias.only.items()):
                kept = [(theirs, sample.labels[ours]) for ours, theirs in {**alias.labels, "le": "le"}.items()
                        if ours in sample.labels]  # fmt: skip
                sums[sample.name.removeprefix(family.name), tuple(kept)] += sample.value
        theirs = Metric(f"vllm:{alias.theirs}", f"As vLLM calls it: {family.documentation}", family.type)
        for (suffix, labels), value in sums.items():
            theirs.add_sample(
                theirs.name + suffix, {"model_name": self._model_name, "engine": "0", **dict(labels)}, value
            )
        return theirs
