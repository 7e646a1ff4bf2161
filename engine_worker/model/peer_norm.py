"""The sum of the ranks' parts with the norm behind it, by kernels/sum_norm.py in memory that all reach of each other.

    peer_norm(device, size)       of the default group; None where its GPUs share no memory

The memory is its own: that of other sums has other slots. It knows no network and no NCCL. It is used in every step of
a group of ranks, twice a layer.
"""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.model.peer_sums import PeerNorm
from kernels.scaled import Scaled

logger = logging.getLogger("worker")

_TRIED_SPINS = 2**22  # some seconds: a rank whose kernel waits for ever would keep the trial from its end


class SharedRows:
    def __init__(self, device: torch.device) -> None:
        """All ranks of the default group make one at the same time. Raises RuntimeError where they share no memory."""
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - alpha: imported by who uses it

        from kernels import sum_norm  # noqa: PLC0415 - imports triton

        self._kernels = sum_norm
        group = dist.distributed_c10d._get_default_group()
        rank, size = group.rank(), group.size()
        num_elements = sum_norm.memory_elements(size)
        memory = _symmetric_memory.empty(num_elements, dtype=torch.int16, device=device).zero_()
        self._handle = _symmetric_memory.rendezvous(memory, group=group)
        buffers = [self._handle.get_buffer(other, (num_elements,), torch.int16) for other in range(size)]
        self._exchange = sum_norm.RowExchange(
            rank=rank,
            own=buffers[rank],
            buffers=torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device),
            counts=torch.zeros(sum_norm.max_rows(size), dtype=torch.int32, device=device),
            max_spins=_TRIED_SPINS,
        )
        self._kept = (memory, buffers)  # mapped for as long as kernels write there
        at_once = sum_norm.PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._max_rows = min(sum_norm.max_rows(size), at_once)
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # from here on the others' flags are zeros too
        torch.cuda.synchronize(device)

    def wait_for_ever(self) -> None:
        """From now on, as a rank that does not come ends the group."""
        self._exchange = replace(self._exchange, max_spins=self._kernels.UNLIMITED)

    def serves(self, part: Tensor) -> bool:
        is_small = 0 < part.shape[0] <= self._max_rows and part.shape[1] <= self._kernels.ROW_ELEMENTS
        return is_small and part.dtype in {torch.bfloat16, torch.float16} and part.stride(1) == 1

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.sum_add_rms_norm(part, residual, weight, eps, self._exchange)

    def add_rms_norm_quantized(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool
    ) -> tuple[Scaled, Tensor]:
        return self._kernels.sum_add_rms_norm_quantized(part, residual, weight, eps, self._exchange, is_grouped)


def peer_norm(device: torch.device, size: int) -> PeerNorm | None:
    """None, and a line of the log, where the GPUs do not reach each other: sums and norms are launches of their own."""
    others = [index for index in range(size) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return None  # peer_memory() says so
    try:
        return SharedRows(device)
    except (RuntimeError, ImportError, AttributeError) as error:  # its interface is alpha
        logger.warning("the GPUs of this group cannot share rows, so norms do not take their sums: %s", error)
        return None
