"""How much memory the device has and has left, measured. A container's limit counts as the machine's.

Who else uses the device is not known, only how much. It is used at a worker's start, where the KV pool is sized, and
for its metrics. It knows no tensor.
"""

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
    step_bytes: int = 0  # to be kept free on CUDA for what a step computes on the way, and for graphs


class MemoryUnknown(ValueError):
    """The system does not say how much memory is free."""


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
    """The device's bytes as they are now; on CUDA the uses add up to all of its memory.

    weights, kv    what this worker loaded and reserved
    kv_host        on a CPU, where it is the same memory: the pool of swapped blocks
    workspace      on CUDA: what torch holds for activations, graphs and staging buffers
    other          everything else, other processes too. A CPU's pools take their pages when blocks are first used,
                   so this is short by what is untouched there
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
    """Bytes of the host in all, and free."""
    return _host_memory(_MEMINFO, _CGROUP)


def _host_memory(meminfo: Path, cgroup: Path) -> tuple[int, int]:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    except OSError:
        raise MemoryUnknown("cannot read /proc/meminfo; give --kv-cache-memory-bytes") from None
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _cgroup_value(cgroup / "memory.max")
    used = _cgroup_value(cgroup / "memory.current")
    if limit is None or used is None:
        return total, free
    return min(total, limit), max(0, min(free, limit - used))


def _cgroup_value(path: Path) -> int | None:
    """None where there is no limit ("max") or no such group."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
