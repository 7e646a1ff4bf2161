"""KV blocks in host memory, and the copies between them and the device pool.

    host pool [num_blocks, L, 2, Hkv, BS, D]    pinned on CUDA; the same shape as the device pool, block 0 is never used

On CUDA the copies run beside the forward pass, on two streams, one a direction. What must wait for what:

    store   the blocks are gathered into a staging buffer on the compute stream (device to device, 1 us a MiB), so that
            what overwrites them need not wait for the link; the copy to the host follows on its own stream
    fetch   waits for all steps before it (one may still write to its target blocks) and for earlier stores; the step
            after it waits for the fetch. So the step of the same batch overlaps with it, and must not read its targets.

Knows block ids only. Times of the copies are measured on their streams and given when they have ended.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_worker.scheduling.batch import BlockCopy, ScheduledBatch, TransferTime

# Two halves: one is filled while the other one drains. 16 blocks of 2 MiB are 0.6 ms of a 50 GB/s link.
_STAGING_BLOCKS_PER_HALF = 32


class HostPool(Protocol):
    blocks: Tensor

    def transfer(self, batch: ScheduledBatch) -> None:
        """Begin the swaps of `batch`. Blocks of earlier fetches can be read by what the compute stream gets next."""

    def finished_transfers(self) -> list[TransferTime]:
        """Times of transfers that have ended since the last call."""


class CpuHostPool:
    """Plain memory beside plain memory: copies happen at once."""

    def __init__(self, device_pool: Tensor, blocks: Tensor) -> None:
        self.blocks = blocks
        self._device_pool = device_pool
        self._finished: list[TransferTime] = []

    def transfer(self, batch: ScheduledBatch) -> None:
        started = time.perf_counter()
        for copy in batch.swap_out:
            self.blocks[copy.target_block_id].copy_(self._device_pool[copy.source_block_id])
        stored = time.perf_counter()
        for copy in batch.swap_in:
            self._device_pool[copy.target_block_id].copy_(self.blocks[copy.source_block_id])
        if batch.swap_out or batch.swap_in:
            seconds = stored - started, time.perf_counter() - stored
            self._finished.append(TransferTime(batch.number, *seconds))

    def finished_transfers(self) -> list[TransferTime]:
        finished, self._finished = self._finished, []
        return finished


class CudaHostPool:
    def __init__(self, device_pool: Tensor, blocks: Tensor) -> None:
        self.blocks = blocks
        self._device_pool = device_pool
        staging = torch.empty(
            (2 * _STAGING_BLOCKS_PER_HALF, *device_pool.shape[1:]), dtype=device_pool.dtype, device=device_pool.device
        )
        self._halves = staging.chunk(2)
        self._half_is_free = [_event(), _event()]
        self._next_half = 0
        self._store_stream = torch.cuda.Stream(device_pool.device)  # type: ignore[no-untyped-call]
        self._fetch_stream = torch.cuda.Stream(device_pool.device)  # type: ignore[no-untyped-call]
        self._stored, self._fetched = _event(), _event()
        self._timed: list[_TimedTransfer] = []

    def transfer(self, batch: ScheduledBatch) -> None:
        compute = torch.cuda.current_stream(self._device_pool.device)
        compute.wait_event(self._fetched)  # of the batch before: from here on its blocks can be read
        if not (batch.swap_out or batch.swap_in):
            return
        timed = _TimedTransfer(batch.number)
        if batch.swap_out:
            with timed.store(self._store_stream):
                self._store(batch.swap_out, compute)
        if batch.swap_in:
            self._fetch_stream.wait_stream(compute)
            self._fetch_stream.wait_event(self._stored)
            with timed.fetch(self._fetch_stream):
                self._fetch(batch.swap_in)
        self._timed.append(timed)

    def finished_transfers(self) -> list[TransferTime]:
        finished = []
        while self._timed and self._timed[0].has_ended():
            finished.append(self._timed.pop(0).time())
        return finished

    def _store(self, copies: Sequence[BlockCopy], compute: torch.cuda.Stream) -> None:
        self._store_stream.wait_event(self._fetched)  # which may still read host blocks that are written now
        for start in range(0, len(copies), _STAGING_BLOCKS_PER_HALF):
            part = copies[start : start + _STAGING_BLOCKS_PER_HALF]
            half, is_free = self._halves[self._next_half], self._half_is_free[self._next_half]
            self._next_half = 1 - self._next_half
            compute.wait_event(is_free)
            block_ids = torch.tensor([copy.source_block_id for copy in part], pin_memory=True)
            device_ids = block_ids.to(half.device, non_blocking=True)
            torch.index_select(self._device_pool, 0, device_ids, out=half[: len(part)])
            self._store_stream.wait_stream(compute)
            with torch.cuda.stream(self._store_stream):
                staged = [BlockCopy(index, copy.target_block_id) for index, copy in enumerate(part)]
                copy_runs(half, self.blocks, staged)
            is_free.record(self._store_stream)
        self._stored.record(self._store_stream)

    def _fetch(self, copies: Sequence[BlockCopy]) -> None:
        with torch.cuda.stream(self._fetch_stream):
            copy_runs(self.blocks, self._device_pool, copies)
        self._fetched.record(self._fetch_stream)


class _Timer:
    """Around work on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._started = _event(timed=True)
        self._ended = _event(timed=True)

    def __enter__(self) -> None:
        self._started.record(self._stream)

    def __exit__(self, *exception: object) -> None:
        self._ended.record(self._stream)

    def has_ended(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        return float(self._started.elapsed_time(self._ended)) / 1e3


class _TimedTransfer:
    """The transfers of one batch. A store's time includes its wait for the steps before it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._store: _Timer | None = None
        self._fetch: _Timer | None = None

    def store(self, stream: torch.cuda.Stream) -> _Timer:
        self._store = _Timer(stream)
        return self._store

    def fetch(self, stream: torch.cuda.Stream) -> _Timer:
        self._fetch = _Timer(stream)
        return self._fetch

    def has_ended(self) -> bool:
        return all(timer is None or timer.has_ended() for timer in (self._store, self._fetch))

    def time(self) -> TransferTime:
        seconds = [timer.seconds() if timer else 0.0 for timer in (self._store, self._fetch)]
        return TransferTime(self._number, *seconds)


def _event(timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def copy_runs(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    """One copy for each run of neighbours on both sides: a call costs the host 5 us, as much as 256 KiB on the link."""
    for run in _runs(copies):
        first, num_blocks = run[0], len(run)
        target[first.target_block_id : first.target_block_id + num_blocks].copy_(
            source[first.source_block_id : first.source_block_id + num_blocks], non_blocking=True
        )


def _runs(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    run: list[BlockCopy] = []
    for copy in copies:
        if run and copy != BlockCopy(run[-1].source_block_id + 1, run[-1].target_block_id + 1):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run
