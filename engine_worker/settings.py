"""The worker's options: one frozen object, read once at start from flags, environment and file (shared/settings.py).

It is composed of its parts' own settings, which are handed down to them whole, and of what the process itself needs:
the store, its names, its end, what it tells. Nothing here imports torch. Does not know how an option is used.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from engine_worker.execution.settings import ExecutionSettings, check_at_least_one
from engine_worker.scheduling.settings import SchedulingSettings
from shared.settings import SettingsError, setting

MIN_DEAD_AFTER_SECONDS = 3  # beats are also late by a step


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    execution: ExecutionSettings
    scheduling: SchedulingSettings

    served_model_name: tuple[str, ...] = setting(
        (), help="name in the API and in the Redis keys (aliases are the gateway's); default: the directory's name"
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", help="the store; unix:///path/to/socket works too")
    worker_id: str = setting("", help="base of this worker's ids; default: host name and process id")
    drain_seconds: float = setting(30.0, help="time after SIGTERM to finish running requests")
    step_timeout_seconds: int = setting(
        30, help="an engine step that takes longer ends the process; ten times as long while it computes on a CPU"
    )
    dead_after_seconds: int = setting(
        15,
        aliases=("--dead-after",),
        help="a worker that sends no heartbeat for so long is dead, and others take its requests; the same for all",
    )
    exit_with_parent: bool = setting(False, help="end when the parent process ends (Linux)")
    metrics_host: str = setting("127.0.0.1", help="address of /metrics, /livez, /readyz and /debug/kv")
    metrics_port: int = setting(8001, help="its port; 0 takes a free one and prints it")
    log_format: str = setting("text", choices=("text", "json"), help="log lines for people or for machines")
    otlp_traces_endpoint: str = setting("", help="OpenTelemetry collector for traces: http://HOST:4318/v1/traces")
    vllm_metric_names: bool = setting(False, help="metrics once more under vLLM's names, on /metrics")

    def __post_init__(self) -> None:
        check_at_least_one("step_timeout_seconds", self.step_timeout_seconds)
        if not 0.0 <= self.drain_seconds < float("inf"):
            raise SettingsError(f"--drain-seconds: 0 or more; got {self.drain_seconds}")
        if self.dead_after_seconds < MIN_DEAD_AFTER_SECONDS:
            least = f"at least {MIN_DEAD_AFTER_SECONDS}, as there is one heartbeat a second"
            raise SettingsError(f"--dead-after-seconds: {least}; got {self.dead_after_seconds}")
        if not 0 <= self.metrics_port <= 65535:
            raise SettingsError(f"--metrics-port: 0 to 65535; got {self.metrics_port}")

    @property
    def model_name(self) -> str:
        return self.served_model_name[0] if self.served_model_name else self.execution.model.resolve().name

    def for_device(self, device: str) -> "WorkerSettings":
        """Return these settings with every None of a part that depends on the device (`cpu` or `cuda`) filled in."""
        execution = self.execution.for_device(device)
        execution = replace(execution, num_threads=execution.num_threads or _threads_of(execution))
        scheduling = self.scheduling.for_device(device, execution.swap_space_bytes or 0)
        return replace(self, execution=execution, scheduling=scheduling)


def _threads_of(execution: ExecutionSettings) -> int:
    """The ranks of a group share the cores."""
    return max(1, physical_cores() // execution.tensor_parallel_size)


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once: two threads of a core share its multipliers."""
    return len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:  # some sandboxes hide it: each CPU counts as a core then
        return str(cpu)
