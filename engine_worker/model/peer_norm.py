"""The fused sum over ranks, residual addition and norm, with kernels/sum_norm.py in memory that all ranks map.

Its memory is separate from that of other all-reduces, which has other slots.
"""

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine_worker.model.peer_sums import PeerNorm
from kernels.scaled import Scaled

logger = logging.getLogger("worker")

_TEST_SPINS = 2**22  # some seconds, so that the self-test ends even if a rank's kernel never comes


class SharedRows:
    """The fused operation of one rank."""

    def __init__(self, device: torch.device) -> None:
        """Map the memory; all ranks of the default group must do it at the same time.

        Raises:
            RuntimeError: If the GPUs cannot share memory.
        """
        from torch.distributed import _symmetric_memory  # noqa: PLC0415 - alpha interface, imported only when used

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
            max_spins=_TEST_SPINS,
        )
        self._kept = (memory, buffers)  # must stay mapped while kernels write to it
        at_once = sum_norm.PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._max_rows = min(sum_norm.max_rows(size), at_once)
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # afterwards the other ranks' flags are zero, too
        torch.cuda.synchronize(device)

    def wait_forever(self) -> None:
        """Wait without limit from now on; a rank that does not come ends the group."""
        self._exchange = replace(self._exchange, max_spins=self._kernels.UNLIMITED)

    def serves(self, part: Tensor) -> bool:
        is_small = 0 < part.shape[0] <= self._max_rows and part.shape[1] <= self._kernels.ROW_ELEMENTS
        return is_small and part.dtype in {torch.bfloat16, torch.float16} and part.stride(1) == 1

    def add_rms_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._kernels.sum_add_rms_norm(part, residual, weight, eps, self._exchange)

    def add_rms_norm_quantized(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, is_grouped: bool, keeps_plain: bool
    ) -> tuple[Scaled, Tensor]:
        return self._kernels.sum_add_rms_norm_quantized(
            part, residual, weight, eps, self._exchange, is_grouped, keeps_plain
        )


def peer_norm(device: torch.device, size: int) -> PeerNorm | None:
    """Return the fused operation for `size` ranks, or None with a log line if the GPUs cannot share memory."""
    others = [index for index in range(size) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return None  # peer_memory() logs it
    try:
        return SharedRows(device)
    except (RuntimeError, ImportError, AttributeError) as error:  # its interface is alpha
        logger.warning("sum and norm: not fused: the GPUs of this group cannot share memory: %s", error)
        return None
