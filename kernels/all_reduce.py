"""The sum of two GPUs' tensors on both of them: each writes its part into the other's memory, and adds what came.

    Exchange(own, peer)                     the memory of the two that both reach, see below
    all_reduce_two(tensor, exchange)        tensor [...] bfloat16, contiguous -> the same tensor, now the sum

Block by block of BLOCK elements: store the block in the peer's buffer, release a flag in the peer's memory, wait for
one's own flag, add what lies in one's own buffer. So an exchange is one way over NVLink, of data and flag, and nobody
waits at the end: a buffer has two slots that take turns, and a rank writes a slot again only when the other has sent
its part of the exchange between, and so has read the slot. How many exchanges a block has had is counted on the
device: a CUDA graph that is replayed goes on counting.

The sum is rounded once to bfloat16, and a + b is b + a, so both have the same bits, those of NCCL. Launches must be the
same on both GPUs, in the same order. It is used in each step of a group, behind a product. It knows no process:
paired_memory.py maps the memory. Without two GPUs the kernel can only be compiled.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch

BLOCK = 2048  # elements: 8 of each of 256 threads, 16 bytes
MOST_BLOCKS = 512  # 2 MiB of bfloat16; all of their programs are on the GPU at once, as each waits for its twin
SLOT_ELEMENTS = MOST_BLOCKS * BLOCK
MEMORY_BYTES = 2 * SLOT_ELEMENTS * 2 + MOST_BLOCKS * 4  # two slots, and behind them a flag of int32 for each block


@dataclass(frozen=True, slots=True)
class Exchange:
    """Zeros at the start, on both GPUs, before either uses them."""

    own: Tensor  # [MEMORY_BYTES / 2] bfloat16, which the peer writes
    peer: Tensor  # the peer's own, as this GPU reaches it
    counts: Tensor  # [MOST_BLOCKS] int32, of this GPU alone: exchanges of each block so far


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
    tl.debug_barrier()  # the stores of all threads come before the flag that one of them releases
    peer_flags = (peer + 2 * SLOT_ELEMENTS).to(tl.pointer_type(tl.int32))
    own_flags = (own + 2 * SLOT_ELEMENTS).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(peer_flags + block, count, sem="release", scope="sys")
    # The peer may be one exchange ahead; the difference is right also where the counts wrap around.
    while tl.atomic_add(own_flags + block, 0, sem="acquire", scope="sys") - count < 0:
        pass
    tl.debug_barrier()
    other = tl.load(own + slot + places, mask=inside, other=0.0, cache_modifier=".cg")  # L1 may hold old ones
    total = part.to(tl.float32) + other.to(tl.float32)
    tl.store(values + places, total.to(values.dtype.element_ty), mask=inside)
    tl.store(counts + block, count)


def all_reduce_two(tensor: Tensor, exchange: Exchange) -> Tensor:
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
