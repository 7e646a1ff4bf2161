"""KV blocks in host memory, and the copies between them and the device pool.

    host pool [num_blocks, L, 2, Hkv, BS, D]    pinned on CUDA; the shape of the device pool; block 0 is unused

On CUDA two streams, one per direction, copy beside the forward pass, with these dependencies:

    store   Blocks are gathered into a staging buffer on the compute stream (device to device, 1 us per MiB), so that
            later writes to them need not wait for the link. The copy to the host follows on the store stream.
    fetch   It waits for all earlier steps, because one may still write to its targets, and for the stores of its
            sources. The next step waits for it. The same batch's step runs beside it and must not read the targets.

Copies are timed on their streams; the times are reported after the copies have ended.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from engine_worker.kv.transfers import BlockCopy, Moves, TransferTime

# A step that stores more waits for the link: 1 GiB takes 18 ms over PCIe 5. Few states move in one step.
STAGING_BYTES, STAGING_BYTES_OF_STATES = 2**30, 2**28
_CHUNK_BLOCKS, _CHUNK_BYTES = 16, 2**27  # at most, of a chunk of the buffer, which is free after its copy to the host


class HostPool(Protocol):
    blocks: Tensor

    def transfer(self, moves: Moves, batch_number: int) -> None:
        """Enqueue the swaps of a batch. Later work on the compute stream may read the blocks of earlier fetches."""

    def finished_transfers(self) -> list[TransferTime]:
        """Return the times of transfers that have ended since the last call."""


def staging_bytes(num_host_blocks: int, bytes_per_block: int, limit_bytes: int = STAGING_BYTES) -> int:
    """Return the bytes of device memory that a host pool needs on CUDA: at most the limit, or two blocks."""
    num_chunks = _num_staging_chunks(num_host_blocks, bytes_per_block, limit_bytes)
    return num_chunks * _blocks_of_chunk(bytes_per_block) * bytes_per_block


def _blocks_of_chunk(bytes_per_block: int) -> int:
    return max(1, min(_CHUNK_BLOCKS, _CHUNK_BYTES // bytes_per_block))


def _num_staging_chunks(num_host_blocks: int, bytes_per_block: int, limit_bytes: int) -> int:
    num_blocks = min(limit_bytes // bytes_per_block, num_host_blocks)
    return max(2, -(-num_blocks // _blocks_of_chunk(bytes_per_block)))  # one fills while another drains


class CpuHostPool:
    """A pool on a CPU, where copies are synchronous."""

    def __init__(self, device_pool: Tensor, blocks: Tensor) -> None:
        self.blocks = blocks
        self._device_pool = device_pool
        self._finished: list[TransferTime] = []

    def transfer(self, moves: Moves, batch_number: int) -> None:
        started = time.perf_counter()
        for copy in moves.swap_out:
            self.blocks[copy.target_block_id].copy_(self._device_pool[copy.source_block_id])
        stored = time.perf_counter()
        for copy in moves.swap_in:
            self._device_pool[copy.target_block_id].copy_(self.blocks[copy.source_block_id])
        if moves.swap_out or moves.swap_in:
            ended = time.perf_counter()
            seconds = (stored - started) * bool(moves.swap_out), (ended - stored) * bool(moves.swap_in)
            self._finished.append(TransferTime(batch_number, *seconds))

    def finished_transfers(self) -> list[TransferTime]:
        finished, self._finished = self._finished, []
        return finished


_StagedCopy: TypeAlias = tuple[BlockCopy, BlockCopy]  # device pool to staging buffer, staging buffer to host


class CudaHostPool:
    def __init__(self, device_pool: Tensor, blocks: Tensor, limit_bytes: int = STAGING_BYTES) -> None:
        """Create the pool. `limit_bytes` of device memory are for the staging buffer."""
        from kernels.kv_block_copy import copy_kv_blocks  # noqa: PLC0415 - imports triton, which needs CUDA

        self._copy_kv_blocks = copy_kv_blocks
        self.blocks = blocks
        self._device_pool = device_pool
        num_chunks = _num_staging_chunks(len(blocks), device_pool[0].nbytes, limit_bytes)
        self._chunk_blocks = _blocks_of_chunk(device_pool[0].nbytes)
        shape = (num_chunks * self._chunk_blocks, *device_pool.shape[1:])
        self._staging = torch.empty(shape, dtype=device_pool.dtype, device=device_pool.device)
        self._chunk_is_free = [_event() for _ in range(num_chunks)]
        self._next_chunk = 0
        self._store_stream = torch.cuda.Stream(device_pool.device)
        self._fetch_stream = torch.cuda.Stream(device_pool.device)
        self._stored, self._fetched = _event(), _event()
        self._timed: list[_TimedTransfer] = []

    def transfer(self, moves: Moves, batch_number: int) -> None:
        compute = torch.cuda.current_stream(self._device_pool.device)
        compute.wait_event(self._fetched)  # of the previous batch, whose blocks can be read from here on
        if not (moves.swap_out or moves.swap_in):
            return
        timed = _TimedTransfer(batch_number)
        if moves.swap_in:
            self._fetch_stream.wait_event(self._stored)  # of previous batches
        if moves.swap_out:
            self._store(moves.swap_out, compute, timed.store(self._store_stream))
        if moves.swap_in:
            self._fetch_stream.wait_stream(compute)
            if _stores_what_it_fetches(moves):
                self._fetch_stream.wait_event(self._stored)
            self._fetch(moves.swap_in, timed.fetch(self._fetch_stream))
        self._timed.append(timed)

    def finished_transfers(self) -> list[TransferTime]:
        finished = []
        while self._timed and self._timed[0].has_ended():
            finished.append(self._timed.pop(0).time())
        return finished

    def _store(self, copies: Sequence[BlockCopy], compute: torch.cuda.Stream, timer: "_Timer") -> None:
        self._store_stream.wait_event(self._fetched)  # it may still read host blocks that are written now
        portion_blocks = len(self._chunk_is_free) // 2 * self._chunk_blocks  # one half is gathered, the other drains
        for start in range(0, len(copies), portion_blocks):
            chunks = self._take_chunks(copies[start : start + portion_blocks])
            self._gather(chunks, compute)
            self._store_stream.wait_stream(compute)
            if start == 0:
                timer.start()
            for chunk, staged in chunks:
                with torch.cuda.stream(self._store_stream):
                    copy_runs(self._staging, self.blocks, [to_host for _, to_host in staged])
                self._chunk_is_free[chunk].record(self._store_stream)
        timer.stop()
        self._stored.record(self._store_stream)

    def _take_chunks(self, copies: Sequence[BlockCopy]) -> list[tuple[int, list[_StagedCopy]]]:
        """Return the next chunks of the staging buffer, and the copies through each."""
        chunks = []
        for start in range(0, len(copies), self._chunk_blocks):
            first = self._next_chunk * self._chunk_blocks
            staged = [
                (BlockCopy(copy.source_block_id, slot), BlockCopy(slot, copy.target_block_id))
                for slot, copy in enumerate(copies[start : start + self._chunk_blocks], first)
            ]
            chunks.append((self._next_chunk, staged))
            self._next_chunk = (self._next_chunk + 1) % len(self._chunk_is_free)
        return chunks

    def _gather(self, chunks: list[tuple[int, list[_StagedCopy]]], compute: torch.cuda.Stream) -> None:
        """Gather all chunks in one launch, after their previous content was copied to the host."""
        for chunk, _ in chunks:
            compute.wait_event(self._chunk_is_free[chunk])
        copies = [to_staging for _, staged in chunks for to_staging, _ in staged]
        self._copy_kv_blocks(self._device_pool, self._staging, block_pairs(copies, self._staging.device))

    def _fetch(self, copies: Sequence[BlockCopy], timer: "_Timer") -> None:
        timer.start()
        with torch.cuda.stream(self._fetch_stream):
            copy_runs(self.blocks, self._device_pool, copies)
        timer.stop()
        self._fetched.record(self._fetch_stream)


class _Timer:
    """The time of work on one stream, measured by two events."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._started = _event(timed=True)
        self._ended = _event(timed=True)

    def start(self) -> None:
        self._started.record(self._stream)

    def stop(self) -> None:
        self._ended.record(self._stream)

    def has_ended(self) -> bool:
        return bool(self._ended.query())

    def seconds(self) -> float:
        return float(self._started.elapsed_time(self._ended)) / 1e3


class _TimedTransfer:
    """The transfers of one batch."""

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


def _stores_what_it_fetches(moves: Moves) -> bool:
    """Return whether a block is evicted and found again in one batch."""
    stored = {copy.target_block_id for copy in moves.swap_out}
    return any(copy.source_block_id in stored for copy in moves.swap_in)


def _event(timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)


def block_pairs(copies: Sequence[BlockCopy], device: torch.device) -> Tensor:
    """Return [P, 2], int32 or int64 (source, target) pairs on the device, without a wait for it."""
    pairs = torch.tensor([(copy.source_block_id, copy.target_block_id) for copy in copies], pin_memory=True)
    return pairs.to(device, non_blocking=True)


def copy_runs(source: Tensor, target: Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copy each run of adjacent blocks in one call, because a call costs as much as 256 KiB on the link (5 us)."""
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
