"""The KV pool: its number of blocks, its tensor, and the block moves before a step.

    pool [num_blocks, P, 2, Hkv, BS, D]    All layers of a group are contiguous, so moving a block is one copy.

Block 0 is never allocated to a sequence: padded table entries point to it, and it stays zero.
"""

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.settings import CUDA_MEMORY_RATIO
from engine_worker.execution.step.host_pool import (
    STAGING_BYTES,
    STAGING_BYTES_OF_STATES,
    CpuHostPool,
    CudaHostPool,
    HostPool,
    block_pairs,
)
from engine_worker.execution.step.memory import DeviceMemory, host_memory
from engine_worker.kv.layout import KVLayout
from engine_worker.kv.transfers import BlockCopy, Transfers, TransferTime

# On a CPU the memory is shared with everything else on the machine, and 2 GiB hold 93,000 tokens of the demo model.
_CPU_DEFAULT_RATIO = 0.25
_CPU_DEFAULT_LIMIT_BYTES = 2 * 2**30


class KVCacheTooSmall(ValueError):
    """The KV cache cannot hold one sequence of max_model_len tokens. The message names flag values that fit."""


class KVCache:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
        num_state_blocks: int = 0,
        num_host_state_blocks: int = 0,
    ):
        """Allocate the pools.

        Args:
            layout: Shape and type of a block.
            num_blocks: Blocks of the device pool, including block 0.
            device: Device of the pool.
            num_host_blocks: Blocks of the host pool, including its unused block 0; 0 for no pool.
            num_state_blocks: Blocks of the state pool, including block 0, which stays zero; 0: no recurrent layers.
            num_host_state_blocks: Blocks of the host pool of states, as num_host_blocks.
        """
        self.layout = layout
        self.pool = _zeros(layout.pool_shape(num_blocks), getattr(torch, layout.dtype), device)
        self.states: Tensor | None = None  # [num_state_blocks, layers, values] float32
        if num_state_blocks:
            self.states = _zeros((num_state_blocks, *layout.state_shape), torch.float32, device)
        self.num_state_blocks, self.num_host_state_blocks = num_state_blocks, num_host_state_blocks
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = layout.block_size
        self.host = _host_pool(self.pool, num_host_blocks) if num_host_blocks else None
        self._host_states: HostPool | None = None
        if self.states is not None and num_host_state_blocks:
            self._host_states = _host_pool(self.states, num_host_state_blocks, STAGING_BYTES_OF_STATES)

    @property
    def nbytes(self) -> int:
        """Bytes of the pools on the device."""
        return self.pool.nbytes + (self.states.nbytes if self.states is not None else 0)

    def apply_transfers(self, transfers: Transfers) -> None:
        """Enqueue all block moves of a batch. Later work on the compute stream sees their results."""
        number = transfers.batch_number
        for moves, pool, host in (
            (transfers.kv, self.pool, self.host),
            (transfers.states, self.states, self._host_states),
        ):
            if host is not None:
                host.transfer(moves, number)
            assert host is not None or not (moves.swap_out or moves.swap_in), "swaps without a host pool"
            if moves.copies:
                assert pool is not None, "the model has no recurrent layers"
                copy_blocks(pool, moves.copies)

    def finished_transfers(self) -> list[TransferTime]:
        """Return the times of transfers that have ended since the last call, per batch and pool."""
        hosts = filter(None, (self.host, self._host_states))
        return [time for host in hosts for time in host.finished_transfers()]


def copy_blocks(pool: Tensor, copies: list[BlockCopy]) -> None:
    """Enqueue copies within a pool; no target is also a source."""
    if pool.is_cuda:
        from kernels.kv_block_copy import copy_kv_blocks  # noqa: PLC0415 - imports triton, which needs CUDA

        copy_kv_blocks(pool, pool, block_pairs(copies, pool.device))
    else:
        sources, targets = zip(*((copy.source_block_id, copy.target_block_id) for copy in copies), strict=True)
        pool[list(targets)] = pool[list(sources)]


def check_cache_bytes(kv_cache_memory_bytes: int, memory: DeviceMemory) -> None:
    """Raise ValueError if the caches would take more than all memory of the device."""
    if kv_cache_memory_bytes > memory.total_bytes:
        raise ValueError(
            f"--kv-cache-memory-bytes: expected at most the memory of {memory.device.type}, "
            f"{_mib(memory.total_bytes)}; got {kv_cache_memory_bytes}"
        )


def cache_budget(memory: DeviceMemory, kv_cache_memory_bytes: int | None, kv_cache_memory_ratio: float | None) -> int:
    """Return the bytes of the KV pool and the state pool together."""
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes
    if memory.device.type == "cuda":
        share = memory.total_bytes * (kv_cache_memory_ratio or CUDA_MEMORY_RATIO)
        budget = max(0.0, share - (memory.total_bytes - memory.free_bytes) - memory.step_bytes)
    elif kv_cache_memory_ratio is not None:
        budget = memory.free_bytes * kv_cache_memory_ratio
    else:
        budget = min(memory.free_bytes * _CPU_DEFAULT_RATIO, _CPU_DEFAULT_LIMIT_BYTES)
    return int(budget)


def num_blocks_that_fit(budget_bytes: int, bytes_per_block: int, max_blocks: int | None) -> int:
    """Return the number of blocks of the pool, including block 0, at most `max_blocks`."""
    fitting = max(0, budget_bytes) // bytes_per_block
    return fitting if max_blocks is None else min(fitting, max_blocks)


def num_host_blocks_that_fit(swap_space_bytes: int, bytes_per_block: int, bytes_of_states: int = 0) -> int:
    """Return the number of blocks of the host pool of KV beside that of states, including its unused block 0; 0: none.

    Raises:
        ValueError: If swap_space_bytes is less than two blocks, or more than the free memory.
    """
    if swap_space_bytes == 0:
        return 0
    num_blocks = (swap_space_bytes - bytes_of_states) // bytes_per_block
    if num_blocks < 2:
        raise ValueError(
            f"--swap-space-bytes: expected 0 or at least {2 * bytes_per_block} (two blocks), got {swap_space_bytes}"
        )
    _, free_bytes = host_memory()
    if swap_space_bytes > free_bytes:
        raise ValueError(
            f"--swap-space-bytes: expected at most the free memory of this host, {_mib(free_bytes)}, or 0; "
            f"got {swap_space_bytes}"
        )
    return num_blocks


def check_capacity(
    num_blocks: int, layout: KVLayout, max_model_len: int, max_new_tokens: int, memory: DeviceMemory
) -> None:
    """Raise KVCacheTooSmall if the pool cannot hold one sequence of `max_model_len` tokens.

    The value is never lowered silently, because users rely on the length they have set. `max_new_tokens` is the limit
    of a sequence's tokens in a step, which its block table holds in addition to a window.
    """
    block_size, bytes_per_block, spans = layout.block_size, layout.block_bytes, layout.spans(max_new_tokens)
    needed_blocks = spans.max_blocks(max_model_len) + 1
    if num_blocks >= needed_blocks:
        return
    needed_bytes = needed_blocks * bytes_per_block
    fitting_tokens = spans.max_tokens(max(0, num_blocks - 1), max_model_len)
    advice = []
    if needed_bytes <= memory.free_bytes:
        advice.append(f"--kv-cache-memory-bytes {needed_bytes}")
    if fitting_tokens:
        advice.append(f"--max-model-len {fitting_tokens}")
    raise KVCacheTooSmall(
        f"the KV cache cannot hold one sequence of --max-model-len {max_model_len} tokens. "
        f"Measured on {memory.device}: {_mib(memory.total_bytes)} in all, {_mib(memory.free_bytes)} free "
        f"after loading {_mib(memory.weights_bytes)} of weights. "
        f"KV takes {layout.token_bytes:,} bytes a token, {bytes_per_block:,} a block of {block_size}; "
        f"{max_model_len} tokens need {needed_blocks} blocks = {_mib(needed_bytes)} (one is padding), "
        f"the budget of {_mib(num_blocks * bytes_per_block)} holds {num_blocks}. "
        + (f"This would fit: {' or '.join(advice)}" if advice else "Nothing fits here; use a smaller model.")
    )


def _host_pool(device_pool: Tensor, num_blocks: int, staging_bytes: int = STAGING_BYTES) -> HostPool:
    shape = (num_blocks, *device_pool.shape[1:])
    if device_pool.is_cuda:
        blocks = torch.empty(shape, dtype=device_pool.dtype, pin_memory=True)
        return CudaHostPool(device_pool, blocks, staging_bytes)
    return CpuHostPool(device_pool, _zeros(shape, device_pool.dtype, torch.device("cpu")))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates zeros with calloc, so pages of unused blocks are never touched. torch.zeros writes all of them.
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
