"""Checks of `pagestream doctor --tensor-parallel-size N`: can the GPUs of this machine share a model?

`pagestream estimate` shows which sizes divide a model.
"""

import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from pagestream.finding import Finding
from pagestream.nvlink import Links

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2**29  # NCCL buffers of a few ranks; the default in containers is 64 MiB
_UNEQUAL_RATIO = 0.02  # of memory; smaller differences are the driver's


def check_group(answer: dict[str, Any] | str, size: int, links: Links, names: Sequence[str]) -> list[Finding]:
    """Check a tensor-parallel group.

    Args:
        answer: Result of the doctor's torch probe, or its error.
        size: Number of ranks.
        links: NVLink pairs.
        names: Names of the GPUs in CUDA_VISIBLE_DEVICES.
    """
    if isinstance(answer, str):
        return []  # already reported
    devices = answer["devices"]
    if not devices:
        message = f"no CUDA device: {size} processes would share the CPU, which is slower than one"
        return [Finding("group", "warn", message, "remove --tensor-parallel-size"), check_channel()]
    if size > len(devices):
        message = f"{size} ranks need {size} GPUs, but {len(devices)} are visible"
        hint = f"use at most --tensor-parallel-size {len(devices)}, or check CUDA_VISIBLE_DEVICES"
        return [Finding("group", "fail", message, hint)]
    findings = [_check_alike(devices[:size]), check_channel()]
    if size > 1:
        findings += [_check_peers(answer["peers"], size, links, names), check_shared_memory()]
    return findings


def check_channel() -> Finding:
    """Check the kernel features that ranks use: memfd, eventfd, and pidfd."""
    try:
        memory = os.memfd_create("pagestream-doctor", os.MFD_CLOEXEC)
        opened = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)  # as ranks open the step channel
        for fd in (memory, opened, os.eventfd(0), os.pidfd_open(os.getpid())):
            os.close(fd)
    except (OSError, AttributeError) as error:
        message = f"memfd, eventfd or pidfd is not available: {error}"
        return Finding(
            "step channel", "fail", message, "needs Linux 5.3, /proc, and a seccomp profile that allows them"
        )
    return Finding("step channel", "ok", "memfd, eventfd and pidfd are available")


def check_shared_memory(directory: Path = SHARED_MEMORY) -> Finding:
    if not directory.is_dir():
        return Finding("shared memory", "warn", f"no {directory}", "NCCL needs it if GPUs lack peer access")
    total = shutil.disk_usage(directory).total
    message = f"{total / 2**20:,.0f} MiB in {directory}"
    if total < SHARED_MEMORY_BYTES:
        hint = "NCCL needs more if GPUs lack peer access: docker run --shm-size 1g, or an emptyDir in memory"
        return Finding("shared memory", "warn", message, hint)
    return Finding("shared memory", "ok", message)


def _check_alike(devices: Sequence[dict[str, Any]]) -> Finding:
    names = [device["name"] for device in devices]
    if len(set(names)) > 1:
        message = f"the GPUs of a group must be of one kind: {', '.join(names)}"
        return Finding("group", "fail", message, "select equal GPUs with CUDA_VISIBLE_DEVICES")
    totals = [device["total_bytes"] for device in devices]
    if max(totals) - min(totals) > _UNEQUAL_RATIO * max(totals):
        message = f"{len(devices)} x {names[0]} of {min(totals) / 2**30:.0f} to {max(totals) / 2**30:.0f} GiB"
        return Finding("group", "warn", message, "the smallest GPU limits the KV blocks of all")
    return Finding("group", "ok", f"{len(devices)} x {names[0]}")


def _check_peers(peers: Sequence[Sequence[int]], size: int, links: Links, names: Sequence[str]) -> Finding:
    reached = {tuple(pair) for pair in peers}
    apart = [f"{one}-{other}" for one, other in combinations(range(size), 2) if (one, other) not in reached]
    if apart:
        message = f"no peer access between GPUs {', '.join(apart)}: NCCL sums through the host"
        return Finding(
            "peer access", "warn", message, "see nvidia-smi topo -m; an IOMMU or a virtual machine may block it"
        )
    pairs = [frozenset(pair) for pair in combinations(names[:size], 2)]
    if len(names) < size or not all(pair in links for pair in pairs):
        message = "peer access without NVLink: the driver reports none, so it is probably over PCIe"
        return Finding("peer access", "warn", message, "sums are slower; nvidia-smi topo -m shows the links")
    return Finding("peer access", "ok", "peer access over NVLink between all GPUs")
