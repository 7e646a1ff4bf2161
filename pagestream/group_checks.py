"""Can the GPUs of this machine share a model? The checks of `pagestream doctor --tensor-parallel-size N`.

Before any walk it judges what torch told of its devices and what the system lets processes share. It starts nothing,
and knows no model: which sizes divide one, `pagestream estimate` says.
"""

import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from pagestream.nvlink import Links
from pagestream.store_checks import Finding

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2**29  # NCCL's buffers of a few ranks; containers have 64 MiB unless told otherwise
_UNEQUAL_RATIO = 0.02  # of memory; less is what the driver keeps


def check_group(answer: dict[str, Any] | str, size: int, links: Links, names: Sequence[str]) -> list[Finding]:
    """`answer`: torch's of its devices, as the doctor asked; `names`: theirs in CUDA_VISIBLE_DEVICES, of `links`."""
    if isinstance(answer, str):
        return []  # said already
    devices = answer["devices"]
    if not devices:
        told = f"no CUDA device: {size} processes would share the CPU, which is slower than one"
        return [Finding("group", "warn", told, "leave --tensor-parallel-size out"), check_channel()]
    if size > len(devices):
        told = f"{size} ranks take {size} GPUs, and {len(devices)} can be seen"
        hint = f"at most --tensor-parallel-size {len(devices)}, or does CUDA_VISIBLE_DEVICES hide some?"
        return [Finding("group", "fail", told, hint)]
    findings = [_check_alike(devices[:size]), check_channel()]
    if size > 1:
        findings += [_check_peers(answer["peers"], size, links, names), check_shared_memory()]
    return findings


def check_channel() -> Finding:
    """Whether ranks can share a file without a name, be woken, and be watched: all that a group needs of the kernel."""
    try:
        memory = os.memfd_create("pagestream-doctor", os.MFD_CLOEXEC)
        opened = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)  # as the ranks' meeting place is opened
        for fd in (memory, opened, os.eventfd(0), os.pidfd_open(os.getpid())):
            os.close(fd)
    except (OSError, AttributeError) as error:
        told = f"no memfd, eventfd or pidfd, or none through /proc: {error}"
        return Finding("step channel", "fail", told, "Linux 5.3 or later with /proc, and a seccomp profile with these")
    return Finding("step channel", "ok", "memfd, eventfd and pidfd are there")


def check_shared_memory(directory: Path = SHARED_MEMORY) -> Finding:
    if not directory.is_dir():
        return Finding("shared memory", "warn", f"no {directory}", "NCCL needs it where GPUs do not reach each other")
    total = shutil.disk_usage(directory).total
    told = f"{total / 2**20:,.0f} MiB in {directory}"
    if total < SHARED_MEMORY_BYTES:
        hint = "NCCL needs more where GPUs do not reach each other: docker run --shm-size 1g, an emptyDir in memory"
        return Finding("shared memory", "warn", told, hint)
    return Finding("shared memory", "ok", told)


def _check_alike(devices: Sequence[dict[str, Any]]) -> Finding:
    names = [device["name"] for device in devices]
    if len(set(names)) > 1:
        told = f"the GPUs of a group must be alike: {', '.join(names)}"
        return Finding("group", "fail", told, "choose some with CUDA_VISIBLE_DEVICES")
    totals = [device["total_bytes"] for device in devices]
    if max(totals) - min(totals) > _UNEQUAL_RATIO * max(totals):
        told = f"{len(devices)} x {names[0]} of {min(totals) / 2**30:.0f} to {max(totals) / 2**30:.0f} GiB"
        return Finding("group", "warn", told, "each has as many KV blocks as the one with the least room")
    return Finding("group", "ok", f"{len(devices)} x {names[0]}")


def _check_peers(peers: Sequence[Sequence[int]], size: int, links: Links, names: Sequence[str]) -> Finding:
    reached = {tuple(pair) for pair in peers}
    apart = [f"{one}-{other}" for one, other in combinations(range(size), 2) if (one, other) not in reached]
    if apart:
        told = f"GPUs {', '.join(apart)} do not reach each other's memory: NCCL sums, through the host"
        return Finding("peer access", "warn", told, "nvidia-smi topo -m; an IOMMU or a virtual machine may forbid it")
    pairs = [frozenset(pair) for pair in combinations(names[:size], 2)]
    if len(names) < size or not all(pair in links for pair in pairs):
        told = "each reaches the memory of the others, by PCIe for all that is known: the driver tells of no NVLink"
        return Finding("peer access", "warn", told, "sums are slower; nvidia-smi topo -m shows the links")
    return Finding("peer access", "ok", "each reaches the memory of the others, by NVLink")
