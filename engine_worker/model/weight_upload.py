"""Copy weights from mapped files to CUDA memory through two pinned buffers, one filled while the other is copied.

A copy from unpinned memory goes through the driver's small buffer, page by page on one thread.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20


def uploader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a host tensor to `device`."""
    return WeightUpload(device) if device.type == "cuda" else partial(Tensor.to, device=device)


class WeightUpload:
    """The two buffers of one device."""

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        # Per buffer: the event after its last copy, when it can be refilled.
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in range(2)]
        self._num_chunks = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device; the last part may be in flight, ordered on the current stream."""
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
        buffer.copy_(source)  # uses all of torch's threads; the file's pages are read here
        target.copy_(buffer, non_blocking=True)
        if copied is not None:
            copied.record()
