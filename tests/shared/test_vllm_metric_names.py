"""vLLM metric aliases: names, labels, and sums as a scraper of vLLM's metrics reads them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, ModelMetrics
from shared.vllm_metric_names import ALIASES, VllmNames
from tests.gateway.fake_inference import heartbeat
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


def test_gateway_has_the_state_of_each_worker_and_the_queue() -> None:
    metrics = ModelMetrics(CollectorRegistry())
    for worker_ids in (["gone", "w.1"], ["w.1", "w.2"]):
        metrics.show_fleet(
            heartbeat(name, running=2, waiting=1, kv_blocks_total=8, kv_blocks_free=2) for name in worker_ids
        )
    metrics.queue_depth.labels("all").set(5)
    found = read(metrics.registry)
    engines = {name: (("engine", name), ("model_name", "m")) for name in ("w.1", "w.2", "queue")}
    assert found["vllm:num_requests_running"] == {engines["w.1"]: 2.0, engines["w.2"]: 2.0}
    assert found["vllm:num_requests_waiting"] == {engines["w.1"]: 1.0, engines["w.2"]: 1.0, engines["queue"]: 5.0}
    assert found["vllm:kv_cache_usage_perc"] == {engines["w.1"]: 0.75, engines["w.2"]: 0.75}


def test_constant_labels_and_values_are_those_of_vllm() -> None:
    found = read(LoadedWorker().metrics.registry)
    assert {dict(key)["source"] for key in found["vllm:prompt_tokens_by_source_total"]} == {
        "local_compute",
        "local_cache_hit",
    }
    assert {dict(key)["reason"] for key in found["vllm:num_requests_waiting_by_reason"]} == {"capacity"}
    assert {dict(key)["sleep_state"] for key in found["vllm:engine_sleep_state"]} == {"awake"}
    [config] = found["vllm:cache_config_info"]
    assert int(dict(config)["block_size"]) > 0 < int(dict(config)["num_gpu_blocks"])


def test_http_requests_are_counted_by_class_of_status() -> None:
    gateway = GatewayMetrics(CollectorRegistry(), vllm_names=True)
    for code in ("200", "201", "503"):
        gateway.http_duration.labels("/v1/models", "GET", code).observe(0.1)
    text = generate_latest(gateway.exposed).decode()
    assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 2.0' in text
    assert 'http_requests_total{handler="/v1/models",method="GET",status="5xx"} 1.0' in text
    assert 'http_request_duration_seconds_count{handler="/v1/models",method="GET"} 3.0' in text
    assert 'http_request_duration_seconds_bucket{handler="/v1/models",le="0.02",method="GET"} 0.0' in text


def test_vllm_histograms_keep_their_buckets() -> None:
    metrics = ModelMetrics(CollectorRegistry())
    metrics.time_to_first_token.labels("batch").observe(0.03)
    found = read(metrics.registry)
    labels = (("engine", "0"), ("model_name", "m"))
    assert found["vllm:time_to_first_token_seconds_count"] == {labels: 1.0}
    buckets = {dict(key)["le"]: value for key, value in found["vllm:time_to_first_token_seconds_bucket"].items()}
    assert (buckets["0.02"], buckets["0.04"], buckets["+Inf"]) == (0.0, 1.0, 1.0)
