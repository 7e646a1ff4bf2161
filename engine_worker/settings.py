"""The worker's options: one frozen object, read once at start from flags, environment and file (shared/settings.py).

Flags keep vLLM's names where both have the option. Nothing here imports torch: what depends on the device stays None
until `for_device` fills it in. Does not know how an option is used.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from shared.settings import SettingsError, parse_bytes, parse_count, setting

KV_BLOCK_SIZES_TOKENS = (8, 16, 32, 64)
PREEMPTION_MODES = ("auto", "swap", "recompute")
MODEL_IMPLS = ("auto", "native", "transformers")
OFFLOADED_PREFIXES = ("reused", "all")
CUDAGRAPH_MODES = ("none", "full_decode_only", "full")


@dataclass(frozen=True)
class DeviceDefaults:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_with_decodes: int | None
    async_scheduling: bool
    swap_space_bytes: int


# Two cores prefill SmolLM2 at about 1,400 tokens/s: 256 prompt tokens are a pause of 0.2 s in the streams beside them.
# There is nothing to hide on a CPU: scheduling and the model share its cores. Nor is there other memory to swap to: it
# is better given to the KV cache.
CPU_DEFAULTS = DeviceDefaults(64, 512, 256, async_scheduling=False, swap_space_bytes=0)
CUDA_DEFAULTS = DeviceDefaults(1024, 8192, None, async_scheduling=True, swap_space_bytes=4 * 2**30)


MIN_DEAD_AFTER_SECONDS = 3  # beats are also late by a step


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    model: Path = setting(help="model directory: config.json and *.safetensors")
    served_model_name: tuple[str, ...] = setting(
        (), help="name in the API and in the Redis keys (aliases are the gateway's); default: the directory's name"
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", help="the store; unix:///path/to/socket works too")
    worker_id: str = setting("", help="base of this worker's ids; default: host name and process id")

    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model runs; auto: cuda if present")
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"), help="type of weights and KV")
    model_impl: str = setting(
        "auto",
        choices=MODEL_IMPLS,
        help="whose code runs the model; auto: this program's where it has the family, else that of transformers",
    )
    load_format: str = setting("auto", choices=("auto", "dummy"), help="dummy: random weights of the config's shape")
    max_model_len: int | None = setting(None, parse=parse_count, help="longest prompt + output; default: the model's")
    num_threads: int | None = setting(None, help="CPU threads of the model; default: the physical cores")

    block_size: int = setting(16, choices=KV_BLOCK_SIZES_TOKENS, help="tokens in a KV block")
    kv_cache_memory_bytes: int | None = setting(None, parse=parse_bytes, help="size of the KV cache, such as 2G")
    kv_cache_memory_ratio: float | None = setting(
        None,
        aliases=("--gpu-memory-utilization",),
        help="cuda: share of all memory for weights, activations and KV; cpu: share of the free memory for the KV",
    )
    swap_space_bytes: int | None = setting(
        None,
        parse=parse_bytes,
        help="host memory for the KV of preempted sequences and evicted prefixes; default: 4G on cuda, none on cpu",
    )
    preemption_mode: str = setting(
        "auto", choices=PREEMPTION_MODES, help="how a preempted sequence gets its KV back; auto: the cheaper way"
    )
    offloaded_prefixes: str = setting(
        "reused",
        choices=OFFLOADED_PREFIXES,
        help="prefixes that the device evicts to host memory: reused: those that a second request has used",
    )
    enable_prefix_caching: bool = setting(True, help="share the KV of common prefixes between requests")
    max_num_seqs: int | None = setting(
        None,
        parse=parse_count,
        help=f"sequences in a step; default: {CPU_DEFAULTS.max_num_seqs} on cpu, {CUDA_DEFAULTS.max_num_seqs} on cuda",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        parse=parse_count,
        help=f"token budget of a step; default: {CPU_DEFAULTS.max_num_batched_tokens} on cpu, "
        f"{CUDA_DEFAULTS.max_num_batched_tokens} on cuda",
    )
    max_prefill_tokens_with_decodes: int | None = setting(
        None,
        parse=parse_count,
        help="prompt tokens in a step that also decodes; "
        f"default: {CPU_DEFAULTS.max_prefill_tokens_with_decodes} on cpu, the rest of the budget on cuda",
    )
    async_scheduling: bool | None = setting(
        None, help="schedule a step while the one before it runs; default: off on cpu, on on cuda"
    )
    deterministic: bool = setting(False, help="no bit of a result depends on the batch or its steps (cuda only)")

    cudagraph_mode: str = setting(
        "full",
        choices=CUDAGRAPH_MODES,
        help="steps that run as CUDA graphs: none, those that only decode, or small ones with prompts too",
    )
    enforce_eager: bool = setting(False, help="the same as --cudagraph-mode none")
    drain_seconds: float = setting(30.0, help="time after SIGTERM to finish running requests")
    step_timeout_seconds: int = setting(30, help="an engine step that takes longer ends the process")
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
        for flag in _AT_LEAST_ONE:
            _check_at_least_one(flag, getattr(self, flag))
        if self.kv_cache_memory_ratio is not None and not 0.0 < self.kv_cache_memory_ratio <= 1.0:
            raise SettingsError(f"--kv-cache-memory-ratio: over 0 and at most 1; got {self.kv_cache_memory_ratio}")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_ratio is not None:
            raise SettingsError("--kv-cache-memory-bytes and --kv-cache-memory-ratio exclude each other")
        if self.swap_space_bytes is not None and self.swap_space_bytes < 0:
            raise SettingsError(f"--swap-space-bytes: 0 or more; got {self.swap_space_bytes}")
        if not 0.0 <= self.drain_seconds < float("inf"):
            raise SettingsError(f"--drain-seconds: 0 or more; got {self.drain_seconds}")
        if self.dead_after_seconds < MIN_DEAD_AFTER_SECONDS:
            least = f"at least {MIN_DEAD_AFTER_SECONDS}, as there is one heartbeat a second"
            raise SettingsError(f"--dead-after-seconds: {least}; got {self.dead_after_seconds}")
        if not 0 <= self.metrics_port <= 65535:
            raise SettingsError(f"--metrics-port: 0 to 65535; got {self.metrics_port}")

    @property
    def model_name(self) -> str:
        return self.served_model_name[0] if self.served_model_name else self.model.resolve().name

    def for_device(self, device: str) -> "WorkerSettings":
        """Return these settings with every None that depends on the device (`cpu` or `cuda`) filled in."""
        defaults = CUDA_DEFAULTS if device == "cuda" else CPU_DEFAULTS
        seqs = self.max_num_seqs or min(defaults.max_num_seqs, self.max_num_batched_tokens or defaults.max_num_seqs)
        tokens = self.max_num_batched_tokens or max(defaults.max_num_batched_tokens, seqs)
        if tokens < seqs:
            raise SettingsError(f"--max-num-batched-tokens: at least --max-num-seqs, {seqs}; got {tokens}")
        ahead = self.async_scheduling
        swap = defaults.swap_space_bytes if self.swap_space_bytes is None else self.swap_space_bytes
        if self.deterministic and device != "cuda":
            raise SettingsError("--deterministic: only on cuda; on a cpu bits depend on the batch")
        if self.preemption_mode == "swap" and swap == 0:
            raise SettingsError("--preemption-mode swap: needs --swap-space-bytes, which is 0 here")
        return replace(
            self,
            device=device,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_prefill_tokens_with_decodes=self.max_prefill_tokens_with_decodes
            or defaults.max_prefill_tokens_with_decodes,
            async_scheduling=defaults.async_scheduling if ahead is None else ahead,
            swap_space_bytes=swap,
            num_threads=self.num_threads or physical_cores(),
        )


_AT_LEAST_ONE = (
    "max_model_len",
    "num_threads",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens_with_decodes",
    "step_timeout_seconds",
)


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once: two threads of a core share its multipliers."""
    return len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:  # some sandboxes hide it: each CPU counts as a core then
        return str(cpu)


def _check_at_least_one(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise SettingsError(f"--{field.replace('_', '-')}: at least 1; got {value}")
