"""From settings to a ModelRunner that is ready to serve: load weights, size and allocate the KV cache, warm up.

Each phase reports its progress; a pool that cannot hold max_model_len tokens is refused with the measured numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_worker.execution.model_runner import ModelRunner

Report = Callable[[str, float, str], None]  # phase ("load" | "allocate_kv" | "warmup"), progress 0..1, detail


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    model: Path
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto = as saved (on a CPU without bf16 instructions: float32)
    load_format: str = "auto"  # auto | dummy (random weights from config.json)
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None  # None = kv_cache_memory_ratio of the free memory
    kv_cache_memory_ratio: float | None = None  # None = the device's default
    max_model_len: int | None = None  # None = the model's own
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_threads: int | None = None  # None = torch's choice (physical cores)


class KVCacheTooSmall(ValueError):
    """The KV cache cannot hold one sequence of max_model_len tokens; the message names flags that would fit."""


def load_model_runner(settings: ExecutionSettings, report: Report) -> ModelRunner:
    raise NotImplementedError
