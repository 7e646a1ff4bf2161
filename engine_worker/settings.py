"""The worker's settings: one frozen object, read at start from flags, environment, and file (shared/settings.py).

It contains the settings of its parts, which get them whole, and those of the process. Nothing here imports torch.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from engine_worker.execution.settings import NO_DRAFTS, DraftSettings, ExecutionSettings, check_at_least_one
from engine_worker.model.draft_head.files import DraftHeadFiles
from engine_worker.scheduling.settings import SchedulingSettings
from engine_worker.scheduling.speculation.config import SpeculativeConfig
from shared.redis_keys import store_namespace
from shared.settings import SettingsError, setting
from shared.store_address import store_url
from shared.tracing import collector_url

MIN_DEAD_AFTER_SECONDS = 3  # one heartbeat per second, which may be late by a step


def draft_settings(speculation: SpeculativeConfig | None, model: Path) -> DraftSettings:
    """Return what a model in the directory `model` drafts; a head without a directory is in that of the model."""
    if speculation is None:
        return NO_DRAFTS
    directory = Path(speculation.model) if speculation.model else model
    head = DraftHeadFiles(speculation.method, directory) if speculation.has_head else None
    lengths = (speculation.prompt_lookup_min, speculation.prompt_lookup_max) if speculation.searches_on_device else None
    return DraftSettings(num_drafts=speculation.num_speculative_tokens, head=head, ngram_lengths=lengths)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    execution: ExecutionSettings
    scheduling: SchedulingSettings

    served_model_name: tuple[str, ...] = setting(
        (), help="model name in the API and in store keys; workers ignore aliases; default: the directory's name"
    )
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        parse=store_url,
        help="URL of the store: redis://, rediss://, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, or "
        "redis+cluster://HOST:PORT,HOST:PORT",
    )
    store_namespace: str = setting(
        "", parse=store_namespace, help="prefix of all names in the store, so that deployments can share one"
    )
    worker_id: str = setting("", help="prefix of this worker's ids; default: host name and process id")
    drain_seconds: float = setting(30.0, help="time to finish running requests after SIGTERM")
    step_timeout_seconds: int = setting(
        30, help="time of an engine step after which the process ends; ten times as long while it computes on a CPU"
    )
    dead_after_seconds: int = setting(
        15,
        aliases=("--dead-after",),
        help="time without a heartbeat after which peers take a worker's requests; use one value for all workers",
    )
    check: bool = setting(False, help="check settings and the model's files, then exit: 0, or 2 with the reason")
    exit_with_parent: bool = setting(False, help="exit when the parent process ends (Linux)")
    metrics_host: str = setting("127.0.0.1", help="address of /metrics, /livez, /readyz, and /debug/kv")
    metrics_port: int = setting(8001, help="port of /metrics; 0: a free port, which is logged")
    log_format: str = setting("text", choices=("text", "json"), help="format of log lines")
    otlp_traces_endpoint: str = setting(
        "",
        parse=collector_url,
        help="OpenTelemetry collector for traces, such as http://HOST:4318/v1/traces; default: no traces",
    )
    vllm_metric_names: bool = setting(False, help="also expose metrics under vLLM's names on /metrics")

    def __post_init__(self) -> None:
        check_at_least_one("step_timeout_seconds", self.step_timeout_seconds)
        if not 0.0 <= self.drain_seconds < float("inf"):
            raise SettingsError(f"--drain-seconds: expected 0 or more, got {self.drain_seconds}")
        if self.dead_after_seconds < MIN_DEAD_AFTER_SECONDS:
            expected = f"expected at least {MIN_DEAD_AFTER_SECONDS}, because heartbeats come once per second"
            raise SettingsError(f"--dead-after-seconds: {expected}; got {self.dead_after_seconds}")
        if not 0 <= self.metrics_port <= 65535:
            raise SettingsError(f"--metrics-port: expected 0 to 65535, got {self.metrics_port}")

    @property
    def model_name(self) -> str:
        return self.served_model_name[0] if self.served_model_name else self.execution.model.resolve().name

    def for_device(self, device: str) -> "WorkerSettings":
        """Return these settings with every device-dependent None filled in. `device`: `cpu` or `cuda`."""
        execution = self.execution.for_device(device)
        execution = replace(execution, num_threads=execution.num_threads or _threads_of(execution))
        scheduling = self.scheduling.for_device(device, execution.swap_space_bytes or 0)
        return replace(self, execution=execution, scheduling=scheduling)


def _threads_of(execution: ExecutionSettings) -> int:
    """Return the threads per rank: the ranks of a group share the cores."""
    return max(1, physical_cores() // execution.tensor_parallel_size)


def physical_cores() -> int:
    """Return the physical cores that this process may use; hyper-threads share a core's multipliers."""
    return len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:  # some sandboxes hide the file; each CPU then counts as a core
        return str(cpu)
