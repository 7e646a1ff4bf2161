"""All-reduces of bfloat16 between GPUs that read each other's memory: torch's symmetric memory and its sums.

    one shot    every rank reads what all have, and adds it up: one wait, and traffic that grows with the ranks
    two shots   every rank adds up a share of the elements, and reads the shares of the others

Its interface is alpha in torch 2.11; beside this file only paired_memory.py knows it. Multicast stays off:
tensor_parallel.py says so before a rank joins. Both ways may be captured in a graph. It is used in each step of a
group. It knows no network and no NCCL.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Two H200s, in a graph (bench/results/h200/all_reduce_2.json): one shot takes 6.6 us for 8 KiB, 15.0 for 1 MiB and 21.6
# for 2 MiB, two shots 13.6 and 16.8 for the last two. NCCL takes 11.6, 21.3 and 38.9; from 32 MiB on it is as fast.
MOST_BYTES = 8 * 2**20
MOST_BYTES_OF_ONE_SHOT = 2**20
_MULTIPLE_BYTES = 16  # that every rank's share is of


class SymmetricMemory:
    """The memory of one rank that all read, and the sums that go through it."""

    name = "symmetric_memory"

    def __init__(
        self,
        device: torch.device,
        most_bytes: int = MOST_BYTES,
        most_bytes_of_one_shot: int = MOST_BYTES_OF_ONE_SHOT,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Every rank of `group`, torch's default one unless given, makes one at the same time.

        Raises RuntimeError where the GPUs do not reach each other.
        """
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - alpha: imported by who uses it

        group = group or dist.distributed_c10d._get_default_group()
        self._group_name = group.group_name
        self._multiple = _MULTIPLE_BYTES * group.size()
        self._most_bytes, self._most_bytes_of_one_shot = most_bytes, most_bytes_of_one_shot
        self._shared: Tensor = _symmetric_memory.empty(most_bytes // 2, dtype=torch.bfloat16, device=device)
        self._handle: Any = _symmetric_memory.rendezvous(self._shared, group=group)

    def serves(self, tensor: Tensor) -> bool:
        """Whether all_reduce() takes `tensor`: a matter of its shape and type, so all ranks agree."""
        is_small = 0 < tensor.nbytes <= self._most_bytes and tensor.nbytes % self._multiple == 0
        return is_small and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in `tensor` or in memory of its own."""
        own, shared = tensor.view(-1), self._shared[: tensor.numel()]
        if tensor.nbytes <= self._most_bytes_of_one_shot:
            summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, own, "sum", self._group_name)
            return summed.view_as(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_(shared.copy_(own), "sum", self._group_name)
        own.copy_(shared)
        return tensor
