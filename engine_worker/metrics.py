"""The worker's Prometheus metrics, in their own registry, rendered at a scrape.

Gauges and counters are read from one EngineStats snapshot per scrape, never in a step. Only the step histograms are
updated in the loop, with children bound once because `labels()` costs more than `observe()`. Names follow Prometheus:
base units, `_total`, ratios 0-1. Block states add up to the capacity.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine_worker.execution.group_health import ALONE, GroupHealth
from engine_worker.kv.kv_durations import DurationCounts, KVDurations
from engine_worker.request_times import RequestTimes
from engine_worker.scheduling.speculation.totals import SpeculationTotals
from engine_worker.scheduling.stats import EngineStats, StepStats
from engine_worker.status import WorkerStatus
from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import WorkerPhase
from shared.vllm_metric_names import with_vllm_names

STEP_SECONDS_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000)
REQUEST_SECONDS_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
REQUESTS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)

# No `_created` series, which double the storage. The library's switch is process-wide.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """The constants of a running worker, and functions that return its variables."""

    device: str
    dtype: str  # of the model's computation
    kv_cache_dtype: str  # of keys and values
    block_size_bytes: int
    max_model_len: int
    memory_bytes: Callable[[], Mapping[str, int]]  # returns the device's memory by use
    quantization: str = "none"  # of the linear layers' weights: none, fp8, int8, or as-stored
    group: Callable[[], GroupHealth] = lambda: ALONE  # returns the state of the ranks that share the model


class WorkerMetrics:
    """All metrics of one worker; also a TimesSink."""

    def __init__(
        self,
        worker: str,
        model: str,
        version: str,
        status: WorkerStatus,
        faults: FaultCounts | None = None,
        *,
        vllm_names: bool = False,
    ) -> None:
        """Create the registry. `faults`: the counts of the transport."""
        self.registry = CollectorRegistry()
        self._exposed = with_vllm_names(self.registry, model) if vllm_names else self.registry
        labels = {"worker": worker, "model": model}
        self._snapshot = _SnapshotCollector(labels, version, status, faults or FaultCounts())
        self.registry.register(self._snapshot)
        ProcessCollector(registry=self.registry)
        names = ("worker", "model")
        self._step_seconds = Histogram(
            "pagestream_step_duration_seconds", "Time of one engine step by phase",
            (*names, "phase"), buckets=STEP_SECONDS_BUCKETS, registry=self.registry,
        )  # fmt: skip
        batch_tokens = Histogram(
            "pagestream_step_batch_tokens", "Tokens computed in one step",
            names, buckets=TOKENS_BUCKETS, registry=self.registry,
        )  # fmt: skip
        batch_requests = Histogram(
            "pagestream_step_batch_requests", "Requests in one step",
            names, buckets=REQUESTS_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._labels = (worker, model)
        self._phases: dict[str, Histogram] = {}
        self._batch_tokens = batch_tokens.labels(*self._labels)
        self._batch_requests = batch_requests.labels(*self._labels)

        self._of_requests(names)

    def _of_requests(self, names: tuple[str, str]) -> None:
        times = (("queue", "in the queue before this worker"), ("prefill", "from there to its first new token"),
                 ("decode", "from its first new token to its end"))  # fmt: skip
        self._request_seconds = {
            part: Histogram(
                f"pagestream_request_{part}_time_seconds", f"A request's time {text}", names,
                buckets=REQUEST_SECONDS_BUCKETS, registry=self.registry,
            ).labels(*self._labels)
            for part, text in times
        }  # fmt: skip
        self._reclaims = Counter(
            "pagestream_queue_reclaims_total", "Requests taken over from dead workers", names,
            registry=self.registry,
        ).labels(*self._labels)  # fmt: skip
        self._given_back = Counter(
            "pagestream_queue_given_back_total", "Requests returned to the queue for less loaded workers",
            names, registry=self.registry,
        ).labels(*self._labels)  # fmt: skip
        claims = Counter(
            "pagestream_claimed_requests_total", "Claimed requests, by the worker that probably has their prefix",
            (*names, "home"), registry=self.registry,
        )  # fmt: skip
        self._claims = {home: claims.labels(*self._labels, home) for home in ("this", "other", "none")}
        self._incarnations = Counter(
            "pagestream_worker_incarnations_total", "Registrations of this worker; more than 1: it was fenced",
            names, registry=self.registry,
        ).labels(*self._labels)  # fmt: skip

    def claimed(self, times: RequestTimes, *, is_resumed: bool) -> None:
        self._request_seconds["queue"].observe(times.claimed - times.queued)
        self._reclaims.inc(is_resumed)

    def began(self, times: RequestTimes) -> None:
        assert times.first_token is not None
        self._request_seconds["prefill"].observe(times.first_token - times.claimed)

    def ended(self, times: RequestTimes, ended: float, reason: str) -> None:
        if times.first_token is not None:
            self._request_seconds["decode"].observe(ended - times.first_token)

    def took(self, home: str, worker_id: str) -> None:
        """Count a claim by `worker_id` of a request whose prefix `home` probably has; "": no worker."""
        place = ("this" if home == worker_id else "other") if home else "none"
        self._claims[place].inc()

    def gave_back(self, num_requests: int) -> None:
        self._given_back.inc(num_requests)

    def incarnation_began(self) -> None:
        self._incarnations.inc()

    def engine_is_ready(self, info: EngineInfo) -> None:
        self._snapshot.info = info

    def observe_step(self, step: StepStats, publish_seconds: float) -> None:
        for phase, seconds in step.phase_seconds.items():
            self._phase(phase).observe(seconds)
        self._phase("publish").observe(publish_seconds)
        self._batch_tokens.observe(step.num_tokens)
        self._batch_requests.observe(step.num_sequences)
        self._snapshot.last_step_timestamp_seconds = time.time()

    def render(self) -> bytes:
        return generate_latest(self._exposed)

    def _phase(self, phase: str) -> Histogram:
        if phase not in self._phases:
            self._phases[phase] = self._step_seconds.labels(*self._labels, phase)
        return self._phases[phase]


class _SnapshotCollector(Collector):
    def __init__(self, labels: Mapping[str, str], version: str, status: WorkerStatus, faults: FaultCounts) -> None:
        self._labels = labels
        self._faults = faults
        self._version = version
        self._status = status
        self.info: EngineInfo | None = None
        self.last_step_timestamp_seconds = 0.0

    def collect(self) -> Iterator[Metric]:
        now = self._status.now
        yield self._gauge("worker_up", "1 while the worker serves", now.phase == WorkerPhase.READY)
        yield self._by(
            "worker_start_phase", "1 for the phase the worker is in", "phase", {p: p == now.phase for p in WorkerPhase}
        )
        timestamp = self.last_step_timestamp_seconds
        yield self._gauge("worker_last_step_timestamp_seconds", "Unix time of the last stored engine step", timestamp)
        yield self._info("build", "Version of the worker", {"version": self._version})
        yield from self._transport()
        if self.info is not None:
            yield from self._engine(self.info)
        if self.info is not None and self._status.stats is not None:
            yield from self._kv_cache(self._status.stats, self.info)
            yield from self._kv_durations(self._status.stats.kv_durations)
            yield from self._work(self._status.stats)
            yield from self._speculation(self._status.stats.speculation)

    def _transport(self) -> Iterator[Metric]:
        faults = self._faults
        for name, text, value in (
            ("workers_reaped", "Dead workers whose requests this worker requeued", faults.num_reaped),
            ("orphaned_requests", "Requests that this worker ended because their gateway was gone", faults.num_ended),
            ("bad_heartbeats", "Received heartbeats that could not be decoded", faults.num_bad_heartbeats),
            ("heartbeat_failures", "Heartbeats that could not be sent", faults.num_failures),
            ("queue_read_failures", "Failed reads of the queue, which were retried", faults.num_read_failures),
            ("store_retries", "Retries of steps and finishes that the store did not take", faults.num_retries),
        ):
            yield self._counter(name, text, value)

    def _engine(self, info: EngineInfo) -> Iterator[Metric]:
        shape = {
            "device": info.device,
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "quantization": info.quantization,
            "max_model_len": str(info.max_model_len),
        }
        yield self._info("engine", "What the engine runs on", shape)
        yield self._gauge("kv_block_size_bytes", "Bytes of one KV block", info.block_size_bytes)
        yield self._by("device_memory_bytes", "Memory of the device by use", "use", info.memory_bytes())
        yield from self._group(info.group())

    def _group(self, group: GroupHealth) -> Iterator[Metric]:
        up, unread = (
            {str(rank): value for rank, value in enumerate(of)} for of in (group.ranks_up, group.messages_behind)
        )
        yield self._by("rank_up", "1 for a rank that has loaded its part of the model", "rank", up)
        yield self._by("rank_messages_behind", "Messages of rank 0 that a rank has not read", "rank", unread)
        skew = group.step_skew_seconds
        yield self._gauge("step_skew_seconds", "Time until the last rank read the latest message of rank 0", skew)
        yield self._info("all_reduce", "Implementation of all-reduce", {"path": group.all_reduce_path})
        waited = group.channel_wait_seconds
        yield self._counter("channel_wait_seconds", "Time that rank 0 waited for ranks to read its messages", waited)

    def _kv_cache(self, stats: EngineStats, info: EngineInfo) -> Iterator[Metric]:
        kv, device = stats.kv_cache, {"device": info.device}
        states = {"active": kv.num_active_blocks, "cached": kv.num_cached_blocks, "free": kv.num_free_blocks}
        slots = kv.num_active_blocks * kv.block_size
        yield self._by("kv_blocks", "KV blocks by state; states add up to the capacity", "state", states, device)
        groups = {str(group): count for group, count in enumerate(kv.group_blocks)}
        text = "KV blocks in the tables of running requests by group of layers; a shared block counts once per table"
        yield self._by("kv_group_blocks", text, "group", groups)
        yield self._gauge("kv_capacity_blocks", "Number of KV blocks", kv.num_blocks, device)
        yield self._gauge("kv_block_size_tokens", "Tokens in one KV block", kv.block_size)
        yield self._gauge("kv_usage_ratio", "Active blocks / capacity", kv.usage_ratio, device)
        waste = kv.num_wasted_slots / slots if slots else 0.0
        yield self._gauge("kv_internal_waste_ratio", "Empty slots / slots in active blocks", waste)
        yield self._gauge("kv_sharing_ratio", "Blocks saved by sharing / blocks in all block tables", kv.sharing_ratio)
        yield from self._kv_moves(stats, info)

    def _kv_moves(self, stats: EngineStats, info: EngineInfo) -> Iterator[Metric]:
        kv, totals, counters = stats.kv_cache, stats.kv_totals, stats.counters
        copied = totals.copied_blocks
        yield self._counter("kv_copy_on_write_blocks", "Shared blocks copied before a write", copied)
        evicted = {info.device: totals.evicted_blocks, "host": totals.evicted_host_blocks}
        yield self._count_by("kv_evicted_blocks", "Cached blocks evicted for new content", "device", evicted)
        num_used = kv.num_host_blocks - kv.num_host_cached_blocks - kv.num_host_free_blocks
        host = {"swapped": num_used, "cached": kv.num_host_cached_blocks, "free": kv.num_host_free_blocks}
        yield self._by("kv_host_blocks", "KV blocks in host memory by state", "state", host)
        swapped = {"in": counters.swapped_in_blocks, "out": counters.swapped_out_blocks}
        swapped_bytes = {direction: count * info.block_size_bytes for direction, count in swapped.items()}
        yield self._count_by("kv_swap_blocks", "Blocks moved between device and host", "direction", swapped)
        yield self._count_by("kv_swap_bytes", "Bytes moved between device and host", "direction", swapped_bytes)
        hits = {info.device: totals.device_hit_tokens, "host": totals.host_hit_tokens}
        queried = totals.queried_tokens
        yield self._counter("prefix_cache_queried_tokens", "Tokens looked up in the prefix cache", queried)
        lost = totals.hit_tokens_lost_for_state
        text = "Tokens whose KV was cached, but not the recurrent state after them"
        yield self._counter("kv_hit_tokens_lost_for_state", text, lost)
        num_live = kv.num_state_blocks - kv.num_free_state_blocks - kv.num_cached_state_blocks
        states = {"live": num_live, "checkpoint": kv.num_cached_state_blocks, "free": kv.num_free_state_blocks}
        yield self._by("recurrent_states", "Blocks of recurrent states by state", "state", states)
        num_swapped = kv.num_host_state_blocks - kv.num_free_host_state_blocks - kv.num_cached_host_state_blocks
        of_host = {
            "swapped": num_swapped, "checkpoint": kv.num_cached_host_state_blocks, "free": kv.num_free_host_state_blocks
        }  # fmt: skip
        yield self._by("host_recurrent_states", "Recurrent states in host memory by state", "state", of_host)
        moved = {"in": totals.fetched_states, "out": totals.stored_states}
        text = "Recurrent states moved between device and host"
        yield self._count_by("recurrent_state_moves", text, "direction", moved)
        yield self._count_by("prefix_cache_hit_tokens", "Tokens found in the prefix cache", "device", hits)

    def _kv_durations(self, durations: KVDurations) -> Iterator[Metric]:
        of_blocks = {"active": durations.active, "cached": durations.cached}
        text = "Time that a block is in use, or is cached until its reuse or eviction"
        yield self._histograms("kv_block_lifetime_seconds", text, "state", of_blocks)
        of_swaps = {"in": durations.swap_in, "out": durations.swap_out}
        text = "Time of one step's transfers between device and host, which overlap with steps"
        yield self._histograms("kv_swap_duration_seconds", text, "direction", of_swaps)

    def _work(self, stats: EngineStats) -> Iterator[Metric]:
        counters = stats.counters
        num_waiting = stats.num_waiting - stats.num_swapped
        states = {"running": stats.num_running, "waiting": num_waiting, "swapped": stats.num_swapped}
        yield self._by("requests", "Requests in the engine by state", "state", states)
        # The only reason so far is a shortage of blocks.
        reason = {"reason": "kv_blocks"}
        yield self._count_by("preemptions", "Preempted sequences", "mode", counters.preemptions, reason)
        sources = {"computed": counters.prompt_tokens_computed, "cached": stats.kv_totals.cached_prompt_tokens}
        yield self._count_by("prompt_tokens", "Prompt tokens by where their KV came from", "source", sources)
        recomputed = counters.recomputed_tokens
        yield self._counter("recomputed_tokens", "Tokens computed again after a preemption", recomputed)
        yield self._counter("generation_tokens", "Tokens generated", counters.generated_tokens)
        yield self._count_by("requests_finished", "Requests ended, by reason", "reason", counters.finished)

    def _speculation(self, totals: SpeculationTotals) -> Iterator[Metric]:
        yield self._counter("spec_decode_drafts", "Sequences that drafted tokens, summed over steps", totals.drafts)
        for name, text, counts in (
            ("spec_decode_draft_tokens", "Drafted tokens by position in the draft", totals.drafted),
            ("spec_decode_accepted_tokens", "Drafted tokens that were right by position in the draft", totals.accepted),
        ):
            yield self._count_by(name, text, "position", {str(place): count for place, count in enumerate(counts)})

    def _gauge(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        return self._add(GaugeMetricFamily, name, text, labels or {}, [((), value)])

    def _counter(self, name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
        return self._add(CounterMetricFamily, name, text, labels or {}, [((), value)])

    def _by(
        self, name: str, text: str, label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
    ) -> Metric:
        return self._add(GaugeMetricFamily, name, text, labels or {}, [((k,), v) for k, v in values.items()], label)

    def _count_by(
        self, name: str, text: str, label: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None
    ) -> Metric:
        return self._add(CounterMetricFamily, name, text, labels or {}, [((k,), v) for k, v in values.items()], label)

    def _histograms(self, name: str, text: str, label: str, values: Mapping[str, DurationCounts]) -> Metric:
        family = HistogramMetricFamily(f"pagestream_{name}", text, labels=[*self._labels, label])
        for value, found in values.items():
            bounds = [*map(str, found.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(found.counts), strict=True))
            family.add_metric([*self._labels.values(), value], buckets, found.sum_seconds)
        return family

    def _info(self, name: str, text: str, values: dict[str, str]) -> Metric:
        family = InfoMetricFamily(f"pagestream_{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), values)
        return family

    def _add(
        self,
        family_class: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: Mapping[str, str],
        samples: list[tuple[tuple[str, ...], float]],
        label: str = "",
    ) -> Metric:
        fixed = {**self._labels, **labels}
        family = family_class(f"pagestream_{name}", text, labels=[*fixed, *([label] if label else [])])
        for label_values, value in samples:
            family.add_metric([*fixed.values(), *label_values], float(value))
        return family
