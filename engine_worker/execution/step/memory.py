"""Measure the total and the free memory of the device. A container's limit counts as the machine's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    device: torch.device
    total_bytes: int
    free_bytes: int
    weights_bytes: int
    step_bytes: int = 0  # reserved on CUDA for activations of a step, and for graphs


class MemoryUnknown(ValueError):
    """The free memory cannot be determined."""


def measure_memory(device: torch.device, weights_bytes: int, step_bytes: int = 0) -> DeviceMemory:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = host_memory()
    return DeviceMemory(
        device=device, total_bytes=total, free_bytes=free, weights_bytes=weights_bytes, step_bytes=step_bytes
    )


def memory_by_use(device: torch.device, weights_bytes: int, kv_bytes: int, host_kv_bytes: int) -> Mapping[str, int]:
    """Return the device's bytes by use; on CUDA they add up to all of its memory.

    weights, kv    memory that this worker loaded and reserved
    kv_host        only on a CPU: the pool of swapped blocks
    workspace      only on CUDA: torch's memory for activations, graphs, and staging buffers
    other          everything else, including other processes. On a CPU it is too low by the pages of unused blocks,
                   which the system allocates at first use
    """
    if device.type != "cuda":
        total, free = host_memory()
        used = {"weights": weights_bytes, "kv": kv_bytes, "kv_host": host_kv_bytes}
    else:
        free, total = torch.cuda.mem_get_info(device)
        workspace = max(0, torch.cuda.memory_reserved(device) - weights_bytes - kv_bytes)
        used = {"weights": weights_bytes, "kv": kv_bytes, "workspace": workspace}
    return {**used, "other": max(0, total - free - sum(used.values())), "free": free}


def host_memory() -> tuple[int, int]:
    """Return the total and the free memory of the host, in bytes.

    Raises:
        MemoryUnknown: If /proc/meminfo cannot be read.
    """
    return _host_memory(_MEMINFO, _CGROUP)


def _host_memory(meminfo: Path, cgroup: Path) -> tuple[int, int]:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:
        raise MemoryUnknown("cannot read /proc/meminfo; set --kv-cache-memory-bytes") from None
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _cgroup_value(cgroup / "memory.max")
    used = _cgroup_value(cgroup / "memory.current")
    if limit is None or used is None:
        return total, free
    return min(total, limit), max(0, min(free, limit - used))


def _cgroup_value(path: Path) -> int | None:
    """Return None without a limit ("max"), or without such a group."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
