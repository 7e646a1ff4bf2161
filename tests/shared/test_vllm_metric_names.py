"""vLLM metric aliases: names, labels, and sums as a scraper of vLLM's metrics reads them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import ModelMetrics
from shared.vllm_metric_names import ALIASES, VllmNames
from tests.monitoring.loaded_worker import LoadedWorker


def read(source: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    registry = CollectorRegistry()
    registry.register(VllmNames(source, "m"))
    return {
        sample.name: {
            tuple(sorted(other.labels.items())): other.value for other in family.samples if other.name == sample.name
        }
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_vllm_aliases_refer_to_existing_metrics() -> None:
    registries = [LoadedWorker().metrics.registry, ModelMetrics(CollectorRegistry()).registry]
    ours = {family.name.removeprefix("pagestream_") for registry in registries for family in registry.collect()}
    assert {alias.ours for alias in ALIASES} <= ours


def test_vllm_values_are_summed_over_other_labels() -> None:
    worker = LoadedWorker().metrics.registry
    found, labels = read(worker), (("engine", "0"), ("model_name", "m"))

    def ours(name: str, **only: str) -> float:
        return sum(
            sample.value
            for family in worker.collect()
            for sample in family.samples
            if sample.name == f"pagestream_{name}" and only.items() <= sample.labels.items()
        )

    assert found["vllm:num_requests_running"] == {labels: ours("requests", state="running")}
    waiting = ours("requests", state="waiting") + ours("requests", state="swapped")
    assert found["vllm:num_requests_waiting"] == {labels: waiting}
    assert found["vllm:num_preemptions_total"] == {labels: ours("preemptions_total")}
    assert found["vllm:prompt_tokens_total"] == {labels: ours("prompt_tokens_total")} != {labels: 0.0}
    reasons = {dict(key)["finished_reason"] for key in found["vllm:request_success_total"]}
    assert {"stop", "length"} <= reasons


def test_vllm_histograms_keep_their_buckets() -> None:
    metrics = ModelMetrics(CollectorRegistry())
    metrics.time_to_first_token.labels("batch").observe(0.03)
    found = read(metrics.registry)
    labels = (("engine", "0"), ("model_name", "m"))
    assert found["vllm:time_to_first_token_seconds_count"] == {labels: 1.0}
    buckets = {dict(key)["le"]: value for key, value in found["vllm:time_to_first_token_seconds_bucket"].items()}
    assert (buckets["0.02"], buckets["0.04"], buckets["+Inf"]) == (0.0, 1.0, 1.0)
