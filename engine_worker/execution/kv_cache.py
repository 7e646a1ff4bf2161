"""The KV pool: how many blocks fit, the one tensor that holds them, and the moves of blocks before a step.

    pool [num_blocks, L, 2, Hkv, BS, D]: all layers of a block are one contiguous run, so moving a block is one copy.
    Block 0 is never allocated to a sequence: padded table entries point there, and it stays zero.

A block's walk, where it is copied. It knows nothing of which sequence owns a block.
"""

import numpy as np
import torch
from torch import Tensor

from engine_worker.execution.host_pool import CpuHostPool, CudaHostPool, HostPool, block_pairs
from engine_worker.execution.memory import DeviceMemory, host_memory
from engine_worker.execution.settings import CUDA_MEMORY_RATIO
from engine_worker.kv.layout import KVLayout
from engine_worker.scheduling.batch import BlockCopy, Transfers, TransferTime

# On a CPU the memory is shared with everything else on the machine, and 2 GiB hold 93,000 tokens of the demo model.
_CPU_DEFAULT_RATIO = 0.25
_CPU_DEFAULT_LIMIT_BYTES = 2 * 2**30


class KVCacheTooSmall(ValueError):
    """The KV cache cannot hold one sequence of max_model_len tokens; the message names flags that would fit."""


class KVCache:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ):
        """`num_host_blocks`: of the host pool, its unused block 0 included; 0 = there is none."""
        (group,) = layout.groups
        self.layout = layout
        self.pool = _zeros(layout.pool_shape(group, num_blocks), getattr(torch, group.dtype), device)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = layout.block_size
        self.host = _host_pool(self.pool, num_host_blocks) if num_host_blocks else None

    def apply_transfers(self, transfers: Transfers) -> None:
        """Begin all block moves of a batch; whatever is computed after this call sees what it should."""
        if self.host is not None:
            self.host.transfer(transfers)
        assert self.host is not None or not (transfers.swap_out or transfers.swap_in), "swaps without a host pool"
        self.copy_blocks(transfers.block_copies)

    def finished_transfers(self) -> list[TransferTime]:
        return self.host.finished_transfers() if self.host is not None else []

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        if not copies:
            return
        if self.pool.is_cuda:
            from kernels.kv_block_copy import copy_kv_blocks  # noqa: PLC0415 - imports triton, which a CPU has not

            copy_kv_blocks(self.pool, self.pool, block_pairs(copies, self.pool.device))
        else:
            sources, targets = zip(*((copy.source_block_id, copy.target_block_id) for copy in copies), strict=True)
            self.pool[list(targets)] = self.pool[list(sources)]


def num_blocks_that_fit(
    memory: DeviceMemory,
    bytes_per_block: int,
    kv_cache_memory_bytes: int | None,
    kv_cache_memory_ratio: float | None,
    max_blocks: int,
) -> int:
    """Blocks of the pool, block 0 included. More than `max_blocks` (every seat at full length) could never be used."""
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes // bytes_per_block
    if memory.device.type == "cuda":
        share = memory.total_bytes * (kv_cache_memory_ratio or CUDA_MEMORY_RATIO)
        budget = max(0.0, share - (memory.total_bytes - memory.free_bytes) - memory.step_bytes)
    elif kv_cache_memory_ratio is not None:
        budget = memory.free_bytes * kv_cache_memory_ratio
    else:
        budget = min(memory.free_bytes * _CPU_DEFAULT_RATIO, _CPU_DEFAULT_LIMIT_BYTES)
    return min(int(budget) // bytes_per_block, max_blocks)


def num_host_blocks_that_fit(swap_space_bytes: int, bytes_per_block: int) -> int:
    """Blocks of the host pool, its unused block 0 included; 0 if there is to be none."""
    if swap_space_bytes == 0:
        return 0
    num_blocks = swap_space_bytes // bytes_per_block
    if num_blocks < 2:
        raise ValueError(f"--swap-space-bytes {swap_space_bytes}: at least two blocks, {2 * bytes_per_block}, or 0")
    _, free_bytes = host_memory()
    if swap_space_bytes > free_bytes:
        raise ValueError(
            f"--swap-space-bytes {swap_space_bytes}: {_mib(free_bytes)} of memory are free on this host; "
            "give less, or 0 for none"
        )
    return num_blocks


def check_capacity(
    num_blocks: int, layout: KVLayout, max_model_len: int, max_new_tokens: int, memory: DeviceMemory
) -> None:
    """Never shortens max_model_len by itself: a server that takes shorter prompts than it was told to is a trap.

    `max_new_tokens`: the most of a sequence in a step, which its table holds beside a window.
    """
    block_size, bytes_per_block = layout.block_size, layout.block_bytes
    needed_blocks = layout.max_blocks(max_model_len, max_new_tokens) + 1
    if num_blocks >= needed_blocks:
        return
    needed_bytes = needed_blocks * bytes_per_block
    fitting_tokens = max(0, num_blocks - 1) * block_size
    advice = []
    if needed_bytes <= memory.free_bytes:
        advice.append(f"--kv-cache-memory-bytes {needed_bytes}")
    if fitting_tokens:
        advice.append(f"--max-model-len {fitting_tokens}")
    raise KVCacheTooSmall(
        f"the KV cache cannot hold one sequence of --max-model-len {max_model_len} tokens. "
        f"Measured on {memory.device}: {_mib(memory.total_bytes)} in all, {_mib(memory.free_bytes)} free "
        f"after loading {_mib(memory.weights_bytes)} of weights. "
        f"KV takes {bytes_per_block // block_size:,} bytes a token, {bytes_per_block:,} a block of {block_size}; "
        f"{max_model_len} tokens need {needed_blocks} blocks = {_mib(needed_bytes)} (one is padding), "
        f"the budget of {_mib(num_blocks * bytes_per_block)} holds {num_blocks}. "
        + (f"This would fit: {' or '.join(advice)}" if advice else "Nothing fits here; use a smaller model.")
    )


def _host_pool(device_pool: Tensor, num_blocks: int) -> HostPool:
    shape = (num_blocks, *device_pool.shape[1:])
    if device_pool.is_cuda:
        return CudaHostPool(device_pool, torch.empty(shape, dtype=device_pool.dtype, pin_memory=True))
    return CpuHostPool(device_pool, _zeros(shape, device_pool.dtype, torch.device("cpu")))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy zeros by calloc: pages of blocks that are never used are never touched. torch.zeros writes them all.
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
