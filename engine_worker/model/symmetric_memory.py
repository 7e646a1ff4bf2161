"""All-reduce of bfloat16 between GPUs with torch's symmetric memory.

One-shot: every rank reads and adds all parts; one wait, but traffic grows with the ranks. Two-shot: every rank adds a
share of the elements and reads the others' shares. Both can be captured in a graph. The interface is alpha in torch
2.11. Multicast stays off (tensor_parallel.py).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Two H200 in a graph (bench/results/multi-gpu.json): one-shot takes 6.6 us for 8 KiB, 15.0 for 1 MiB and 21.6
# for 2 MiB, two-shot 13.6 and 16.8 for the last two. NCCL takes 11.6, 21.3 and 38.9 us; from 32 MiB on it is as fast.
MAX_BYTES = 8 * 2**20
MAX_ONE_SHOT_BYTES = 2**20
_MULTIPLE_BYTES = 16  # each rank's share is a multiple of this


class SymmetricMemory:
    """One rank's shared memory and the all-reduces through it."""

    name = "symmetric_memory"

    def __init__(
        self,
        device: torch.device,
        max_bytes: int = MAX_BYTES,
        max_one_shot_bytes: int = MAX_ONE_SHOT_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Map the memory; all ranks of `group` (default: torch's) must do it at the same time.

        Raises:
            RuntimeError: If the GPUs have no peer access.
        """
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - alpha interface, imported only when used

        group = group or dist.distributed_c10d._get_default_group()
        self._group_name = group.group_name
        self._multiple = _MULTIPLE_BYTES * group.size()
        self._max_bytes, self._max_one_shot_bytes = max_bytes, max_one_shot_bytes
        self._shared: Tensor = _symmetric_memory.empty(max_bytes // 2, dtype=torch.bfloat16, device=device)
        self._handle: Any = _symmetric_memory.rendezvous(self._shared, group=group)

    def serves(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is supported, from its shape and dtype, so that all ranks agree."""
        is_small = 0 < tensor.nbytes <= self._max_bytes and tensor.nbytes % self._multiple == 0
        return is_small and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in `tensor` or in new memory."""
        own, shared = tensor.view(-1), self._shared[: tensor.numel()]
        if tensor.nbytes <= self._max_one_shot_bytes:
            summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, own, "sum", self._group_name)
            return summed.view_as(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_(shared.copy_(own), "sum", self._group_name)
        own.copy_(shared)
        return tensor
