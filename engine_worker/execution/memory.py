"""How much memory the device has and has left, measured. A container's limit counts as the machine's."""

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
