"""Weights from a mapped file to CUDA memory, through two pinned buffers: one is filled while the other one is copied.

A copy from memory that is not pinned goes through the driver's own small buffer, page after page and on one thread.
Knows bytes only. It is used at a worker's start, while weights load.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20


def uploader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a tensor of the host to `device`."""
    return WeightUpload(device) if device.type == "cuda" else partial(Tensor.to, device=device)


class WeightUpload:
    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        # By buffer, when its last copy has ended: it can be filled again.
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in range(2)]
        self._num_chunks = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the device, its end perhaps still on the way: in order with the current stream."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source_bytes = tensor.contiguous().view(-1).view(torch.uint8)
        target_bytes = target.view(-1).view(torch.uint8)
        for source, part in zip(
            source_bytes.split(self._chunk_bytes), target_bytes.split(self._chunk_bytes), strict=True
        ):
            self._copy(source, part)
        return target

    def _copy(self, source: Tensor, target: Tensor) -> None:
        buffer, copied = self._buffers[self._num_chunks % 2][: len(source)], self._copied[self._num_chunks % 2]
        self._num_chunks += 1
        if copied is not None:
            copied.synchronize()
        buffer.copy_(source)  # on all of torch's threads; the file's pages are read here
        target.copy_(buffer, non_blocking=True)
        if copied is not None:
            copied.record()
