"""All-reduce of a bfloat16 tensor between two GPUs through peer memory over NVLink.

Both GPUs must make the same launches in the same order. The sum is rounded once to bfloat16, and a + b equals b + a, so
both GPUs get the same bits, which are also those of NCCL. Exchanges are counted on the device, so a replayed CUDA graph
continues the count. engine_worker/model/paired_memory.py maps the memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

BLOCK = 2048  # elements: 8 per thread for 256 threads, 16 bytes each
MAX_BLOCKS = 512  # 2 MiB of bfloat16; all programs must be resident at once, because each waits for its twin
SLOT_ELEMENTS = MAX_BLOCKS * BLOCK
MEMORY_BYTES = 2 * SLOT_ELEMENTS * 2 + MAX_BLOCKS * 4  # two slots, then one int32 flag per block


@dataclass(frozen=True, slots=True)
class Exchange:
    """Memory that both GPUs can write; all zeros on both before first use."""

    own: Tensor  # [MEMORY_BYTES / 2] bfloat16, written by the peer
    peer: Tensor  # the peer's `own`, mapped into this GPU's address space
    counts: Tensor  # [MAX_BLOCKS] int32, local: number of exchanges so far per block


@triton.jit
def _all_reduce_two_kernel(
    values, own, peer, counts, num_elements,
    BLOCK: tl.constexpr, SLOT_ELEMENTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(counts + block) + 1
    slot = (count & 1) * SLOT_ELEMENTS
    part = tl.load(values + places, mask=inside, other=0.0)
    tl.store(peer + slot + places, part, mask=inside)
    tl.debug_barrier()  # all threads must store before one thread releases the flag
    peer_flags = (peer + 2 * SLOT_ELEMENTS).to(tl.pointer_type(tl.int32))
    own_flags = (own + 2 * SLOT_ELEMENTS).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(peer_flags + block, count, sem="release", scope="sys")
    # The peer may be one exchange ahead. The difference stays correct when the counts wrap around.
    while tl.atomic_add(own_flags + block, 0, sem="acquire", scope="sys") - count < 0:
        pass
    tl.debug_barrier()
    other = tl.load(own + slot + places, mask=inside, other=0.0, cache_modifier=".cg")  # L1 may hold stale values
    total = part.to(tl.float32) + other.to(tl.float32)
    tl.store(values + places, total.to(values.dtype.element_ty), mask=inside)
    tl.store(counts + block, count)


def all_reduce_two(tensor: Tensor, exchange: Exchange) -> Tensor:
    """Replace `tensor` by the sum of both GPUs' tensors.

    Each program copies its block into the peer's buffer, releases a flag in the peer's memory, waits for its own flag
    and adds the received block. An exchange therefore costs one transfer of data and flag. Nothing waits at the end: a
    buffer has two slots used in turn, and a rank reuses a slot only after the peer's next exchange, that is, after it
    was read.

    Args:
        tensor: [...], bfloat16, contiguous, 1 to SLOT_ELEMENTS elements; modified in place.
        exchange: The memory shared with the peer.

    Returns:
        `tensor`.
    """
    num_elements = tensor.numel()
    assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and 0 < num_elements <= SLOT_ELEMENTS
    _all_reduce_two_kernel[(triton.cdiv(num_elements, BLOCK),)](
        tensor,
        exchange.own,
        exchange.peer,
        exchange.counts,
        num_elements,
        BLOCK=BLOCK,
        SLOT_ELEMENTS=SLOT_ELEMENTS,
        num_warps=8,
        **dependent_launch(tensor),
    )
    return tensor
