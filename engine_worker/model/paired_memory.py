"""All-reduce of bfloat16 between two GPUs with kernels/all_reduce.py, in memory that both map.

Measured on two H200, 8 KiB to 2 MiB in a graph: bench/results/multi-gpu.json.
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.model.peer_sums import PeerMemory
from engine_worker.model.symmetric_memory import SymmetricMemory

logger = logging.getLogger("worker")


class PairedMemory:
    name = "own"

    def __init__(self, device: torch.device) -> None:
        """Map the memory; both ranks of the default group must do it at the same time.

        Raises:
            RuntimeError: If the GPUs cannot share memory.
        """
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - alpha interface, imported only when used

        from kernels import all_reduce  # noqa: PLC0415 - imports triton

        self._kernel = all_reduce
        group = dist.distributed_c10d._get_default_group()
        own, peer = group.rank(), 1 - group.rank()
        num_elements = all_reduce.MEMORY_BYTES // 2
        self._memory = _symmetric_memory.empty(num_elements, dtype=torch.bfloat16, device=device).zero_()
        handle = _symmetric_memory.rendezvous(self._memory, group=group)
        self._exchange = all_reduce.Exchange(
            own=handle.get_buffer(own, (num_elements,), torch.bfloat16),
            peer=handle.get_buffer(peer, (num_elements,), torch.bfloat16),
            counts=torch.zeros(all_reduce.MAX_BLOCKS, dtype=torch.int32, device=device),
        )
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # afterwards the peer's flags are zero, too
        torch.cuda.synchronize(device)

    def serves(self, tensor: Tensor) -> bool:
        is_small = 0 < tensor.numel() <= self._kernel.SLOT_ELEMENTS
        return is_small and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place over both ranks."""
        return self._kernel.all_reduce_two(tensor, self._exchange)


class _InTurn:
    """The first of several implementations that supports a tensor."""

    def __init__(self, *ways: PeerMemory) -> None:
        self._ways = ways
        self.name = ways[0].name

    def serves(self, tensor: Tensor) -> bool:
        return any(way.serves(tensor) for way in self._ways)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return next(way for way in self._ways if way.serves(tensor)).all_reduce(tensor)


def peer_memory(device: torch.device, size: int) -> PeerMemory | None:
    """Return the all-reduce for `size` ranks, or None with a log line if NCCL must sum.

    For a pair, it uses PairedMemory up to 2 MiB and torch's symmetric memory above.
    """
    others = [index for index in range(size) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        logger.warning("all-reduce: using NCCL: the GPUs of this group have no peer access")
        return None
    try:
        everything = SymmetricMemory(device)
        return _InTurn(PairedMemory(device), everything) if size == 2 else everything
    except (RuntimeError, ImportError, AttributeError) as error:  # its interface is alpha, and NCCL is always available
        logger.warning("all-reduce: using NCCL: the GPUs of this group cannot share memory: %s", error)
        return None
