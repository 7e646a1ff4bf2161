"""The worker's Prometheus metrics, parsed by the official client: families, sums of block states, histograms."""

from dataclasses import fields

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine_worker.metrics import EngineInfo, WorkerMetrics
from engine_worker.request_times import RequestTimes
from engine_worker.status import WorkerStatus
from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import WorkerPhase
from tests.builders import make_engine, make_request

BLOCK_BYTES = 1000
LIFETIME, SWAP_DURATION = "pagestream_kv_block_lifetime_seconds", "pagestream_kv_swap_duration_seconds"
EVERY_FAMILY = """
    kv_blocks kv_capacity_blocks kv_block_size_tokens kv_block_size_bytes kv_usage_ratio kv_internal_waste_ratio
    kv_sharing_ratio kv_copy_on_write_blocks kv_evicted_blocks kv_group_blocks kv_swap_blocks kv_swap_bytes
    kv_swap_duration_seconds kv_block_lifetime_seconds
    kv_host_blocks kv_hit_tokens_lost_for_state recurrent_states host_recurrent_states
    recurrent_state_moves prefix_cache_queried_tokens
    prefix_cache_hit_tokens recomputed_tokens preemptions requests
    step_duration_seconds step_batch_tokens step_batch_requests prompt_tokens generation_tokens requests_finished
    request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    queue_reclaims queue_given_back claimed_requests worker_incarnations
    workers_reaped orphaned_requests bad_heartbeats heartbeat_failures queue_read_failures store_retries
    worker_up worker_last_step_timestamp_seconds worker_start_phase device_memory_bytes build_info engine_info
    rank_up rank_messages_behind channel_wait_seconds step_skew_seconds all_reduce_info
    spec_decode_drafts spec_decode_draft_tokens spec_decode_accepted_tokens
"""


@pytest.fixture
def status() -> WorkerStatus:
    return WorkerStatus("w0", "1.2.3")


@pytest.fixture
def metrics(status: WorkerStatus) -> WorkerMetrics:
    return WorkerMetrics("w0", "tiny", "1.2.3", status)


def scrape(metrics: WorkerMetrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def values(metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in metric.samples}


def value(metric: Metric) -> float:
    (sample,) = metric.samples
    return float(sample.value)


def run_steps(status: WorkerStatus, metrics: WorkerMetrics, num_steps: int) -> None:
    """Run two requests of 6 and 9 prompt tokens in a pool of 64 blocks of 4."""
    engine = make_engine()
    memory = {"weights": 700, "kv": 65 * BLOCK_BYTES}
    metrics.engine_is_ready(
        EngineInfo(
            device="gpu",
            dtype="float32",
            kv_cache_dtype="bfloat16",
            block_size_bytes=BLOCK_BYTES,
            max_model_len=256,
            memory_bytes=lambda: memory,
        )
    )
    for num_prompt in (6, 9):
        engine.add_request(make_request(num_prompt, max_tokens=20, ignore_eos=True))
    for _ in range(num_steps):
        engine.step()
        metrics.observe_step(engine.last_step, 0.002)
    status.stats = engine.stats()


def test_metrics_families_are_exactly_the_documented(status: WorkerStatus, metrics: WorkerMetrics) -> None:
    run_steps(status, metrics, 3)
    ours = {name.removeprefix("pagestream_") for name in scrape(metrics) if name.startswith("pagestream_")}
    assert ours == set(EVERY_FAMILY.split())
    assert b"_created" not in metrics.render()


def test_metrics_fault_counters_start_at_zero(status: WorkerStatus) -> None:
    faults = FaultCounts()
    metrics = WorkerMetrics("w0", "tiny", "1.2.3", status, faults)
    exported = {
        "num_reaped": "workers_reaped", "num_ended": "orphaned_requests", "num_bad_heartbeats": "bad_heartbeats",
        "num_failures": "heartbeat_failures", "num_read_failures": "queue_read_failures",
        "num_retries": "store_retries",
    }  # fmt: skip
    assert exported.keys() == {field.name for field in fields(FaultCounts)}
    for number, name in enumerate(exported, 1):
        assert value(scrape(metrics)[f"pagestream_{exported[name]}"]) == 0
        setattr(faults, name, number)
        assert value(scrape(metrics)[f"pagestream_{exported[name]}"]) == number


def test_metrics_block_states_add_up_to_capacity(status: WorkerStatus, metrics: WorkerMetrics) -> None:
    run_steps(status, metrics, 3)
    families = scrape(metrics)
    blocks = values(families["pagestream_kv_blocks"], "worker", "model", "device", "state")
    assert blocks == {
        ("w0", "tiny", "gpu", "active"): 5.0,  # 8 and 11 computed tokens in blocks of 4
        ("w0", "tiny", "gpu", "cached"): 0.0,
        ("w0", "tiny", "gpu", "free"): 59.0,
    }
    assert sum(blocks.values()) == value(families["pagestream_kv_capacity_blocks"]) == 64
    assert value(families["pagestream_kv_usage_ratio"]) == 5 / 64
    assert values(families["pagestream_kv_group_blocks"], "group") == {("0",): 5.0}
    assert value(families["pagestream_kv_block_size_tokens"]) == 4
    assert value(families["pagestream_kv_block_size_bytes"]) == BLOCK_BYTES
    # Computed: 8 and 11 of 20 slots.
    assert value(families["pagestream_kv_internal_waste_ratio"]) == pytest.approx(1 / 20)


def test_metrics_counters_and_histograms_follow_steps(status: WorkerStatus, metrics: WorkerMetrics) -> None:
    run_steps(status, metrics, 3)
    families = scrape(metrics)
    assert value(families["pagestream_generation_tokens"]) == 6
    assert values(families["pagestream_prompt_tokens"], "source") == {("computed",): 15.0, ("cached",): 0.0}
    states = {("running",): 2.0, ("waiting",): 0.0, ("swapped",): 0.0}
    assert values(families["pagestream_requests"], "state") == states
    assert values(families["pagestream_kv_swap_blocks"], "direction") == {("in",): 0.0, ("out",): 0.0}
    assert values(families["pagestream_preemptions"], "mode", "reason").keys() == {
        ("recompute", "kv_blocks"),
        ("swap", "kv_blocks"),
    }
    sums = {sample.name: sample.value for sample in families["pagestream_step_batch_tokens"].samples}
    assert sums["pagestream_step_batch_tokens_sum"] == 15 + 2 + 2
    phases = {
        sample.labels["phase"]: sample.value
        for sample in families["pagestream_step_duration_seconds"].samples
        if sample.name.endswith("_count")
    }
    assert phases == dict.fromkeys(("schedule", "prepare", "forward", "sample", "apply", "publish"), 3.0)


def test_metrics_block_and_swap_durations_are_histograms(status: WorkerStatus, metrics: WorkerMetrics) -> None:
    run_steps(status, metrics, 1)
    assert status.stats is not None
    status.stats.kv_durations.cached.add(0.05)
    status.stats.kv_durations.cached.add(7200.0)
    status.stats.kv_durations.swap_out.add(0.002)
    samples = {
        (sample.name, sample.labels[label], sample.labels.get("le")): sample.value
        for name, label in ((LIFETIME, "state"), (SWAP_DURATION, "direction"))
        for sample in scrape(metrics)[name].samples
    }
    buckets = [samples[f"{LIFETIME}_bucket", "cached", le] for le in ("0.025", "0.05", "3600.0", "+Inf")]
    assert buckets == [0, 1, 1, 2]
    assert samples[f"{LIFETIME}_count", "cached", None] == 2
    assert samples[f"{LIFETIME}_sum", "cached", None] == 7200.05
    assert samples[f"{SWAP_DURATION}_sum", "out", None] == 0.002
    assert samples[f"{SWAP_DURATION}_count", "in", None] == 0


def test_metrics_before_load_export_only_the_phase(status: WorkerStatus, metrics: WorkerMetrics) -> None:
    status.report(WorkerPhase.LOAD, 0.5)
    families = scrape(metrics)
    phases = values(families["pagestream_worker_start_phase"], "phase")
    assert {phase for (phase,), is_in in phases.items() if is_in} == {"load"}
    assert value(families["pagestream_worker_up"]) == 0
    assert "pagestream_kv_blocks" not in families
    status.report(WorkerPhase.READY, 1.0)
    assert value(scrape(metrics)["pagestream_worker_up"]) == 1


def test_metrics_request_phases_and_incarnations(metrics: WorkerMetrics) -> None:
    times = RequestTimes(traceparent="", queued=1.0, claimed=1.5, first_token=2.5)
    metrics.claimed(times, is_resumed=True)
    metrics.began(times)
    metrics.ended(times, 5.5, "stop")
    metrics.ended(RequestTimes(traceparent="", queued=1.0, claimed=1.5), 5.5, "cancelled")  # no first token
    metrics.incarnation_began()
    families = scrape(metrics)
    for part, seconds in (("queue", 0.5), ("prefill", 1.0), ("decode", 3.0)):
        samples = {sample.name: sample.value for sample in families[f"pagestream_request_{part}_time_seconds"].samples}
        assert samples[f"pagestream_request_{part}_time_seconds_sum"] == seconds
        assert samples[f"pagestream_request_{part}_time_seconds_count"] == 1
    assert value(families["pagestream_queue_reclaims"]) == value(families["pagestream_worker_incarnations"]) == 1


def test_claims_are_counted_by_the_worker_with_the_prefix(metrics: WorkerMetrics) -> None:
    for home in ("w0.1", "w0.1", "w1.2", ""):
        metrics.took(home, "w0.1")
    samples = scrape(metrics)["pagestream_claimed_requests"].samples
    assert {one.labels["home"]: one.value for one in samples if one.name.endswith("_total")} == {
        "this": 2, "other": 1, "none": 1,
    }  # fmt: skip
