"""The worker's options: one frozen object, read once at start from flags, environment and file (shared/settings.py).

Flags keep vLLM's names where both have the option. Nothing here imports torch: what depends on the device (block counts, the
token budget) stays None until it is known. Does not know how an option is used.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shared.settings import SettingsError, parse_bytes, parse_count, setting

KV_BLOCK_SIZES_TOKENS = (8, 16, 32, 64)
MAX_SEQUENCE_SLOTS = 1024
CPU_BATCHED_TOKENS = 512  # about 0.3 s of prefill on two cores: the longest pause that running streams see
GPU_BATCHED_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    model: Path = setting(help="model directory: config.json and *.safetensors", parse=Path)
    served_model_name: str = setting("", help="name in the API and in the Redis keys; default: the directory's name")
    redis_url: str = setting("redis://127.0.0.1:6379/0", help="the store; unix:///path/to/socket works too")
    worker_id: str = setting("", help="base of this worker's ids; default: host name and process id")

    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model runs; auto takes cuda if present")
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16"), help="type of weights and KV")
    load_format: str = setting("auto", choices=("auto", "dummy"), help="dummy: random weights of the config's shape")
    max_model_len: int | None = setting(None, parse=parse_count, help="longest prompt + output; default: the model's own")
    num_threads: int | None = setting(None, parse=int, help="CPU threads of the model; default: the physical cores")

    block_size: int = setting(16, parse=int, help="tokens in a KV block: 8, 16, 32 or 64")
    kv_cache_memory_bytes: int | None = setting(None, parse=parse_bytes, help="size of the KV cache, such as 2G")
    kv_cache_memory_ratio: float | None = setting(
        None, parse=float, help="share of the free memory that the KV cache takes when no size is given"
    )
    max_num_seqs: int = setting(256, parse=parse_count, help="sequences in one step at most")
    max_num_batched_tokens: int | None = setting(
        None, parse=parse_count, help=f"token budget of a step; default: {CPU_BATCHED_TOKENS} (cpu), {GPU_BATCHED_TOKENS} (cuda)"
    )

    drain_seconds: float = setting(30.0, parse=float, help="time after SIGTERM to finish running requests")
    step_timeout_seconds: float = setting(30.0, parse=float, help="a step that takes longer ends the process")
    exit_with_parent: bool = setting(False, help="end when the parent process ends (Linux)")
    metrics_host: str = setting("127.0.0.1", help="address of /metrics, /livez and /readyz")
    metrics_port: int = setting(8001, parse=int, help="its port; 0 takes a free one and prints it")
    log_format: str = setting("text", choices=("text", "json"), help="log lines for people or for machines")

    def __post_init__(self) -> None:
        _require(self.block_size in KV_BLOCK_SIZES_TOKENS, "--block-size", f"one of {KV_BLOCK_SIZES_TOKENS}", self.block_size)
        _require(1 <= self.max_num_seqs <= MAX_SEQUENCE_SLOTS, "--max-num-seqs", f"1 to {MAX_SEQUENCE_SLOTS}", self.max_num_seqs)
        _require(self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
                 "--max-num-batched-tokens", f"at least --max-num-seqs ({self.max_num_seqs})", self.max_num_batched_tokens)
        for flag, value in (("--max-model-len", self.max_model_len), ("--num-threads", self.num_threads),
                            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes)):
            _require(value is None or value >= 1, flag, "at least 1", value)
        _require(self.kv_cache_memory_ratio is None or 0.0 < self.kv_cache_memory_ratio <= 1.0,
                 "--kv-cache-memory-ratio", "over 0 and at most 1", self.kv_cache_memory_ratio)
        _require(self.kv_cache_memory_bytes is None or self.kv_cache_memory_ratio is None,
                 "--kv-cache-memory-ratio", "absent when --kv-cache-memory-bytes is given", self.kv_cache_memory_ratio)
        _require(self.drain_seconds >= 0, "--drain-seconds", "0 or more", self.drain_seconds)
        _require(self.step_timeout_seconds > 0, "--step-timeout-seconds", "over 0", self.step_timeout_seconds)
        _require(0 <= self.metrics_port <= 65535, "--metrics-port", "0 to 65535", self.metrics_port)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    def thread_count(self) -> int:
        return self.num_threads or physical_cores()


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once: two threads on one core's multipliers only disturb each other."""
    allowed = os.sched_getaffinity(0)
    siblings = {_core_of(cpu) for cpu in allowed}
    return max(1, len(siblings))


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:  # no sysfs in some sandboxes: count each CPU as a core
        return str(cpu)


def _require(holds: bool, flag: str, expected: str, value: object) -> None:
    if not holds:
        raise SettingsError(f"{flag}: expected {expected}, got {value}")
