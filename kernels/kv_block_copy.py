"""Copy whole KV blocks inside one pool, for copy-on-write: all layers, keys and values of a block at once.

    copy_kv_blocks(kv_cache, block_copies) -> None, writes into kv_cache
        kv_cache       [N, ...]   contiguous pool; a block is everything after the first dimension
        block_copies   [P, 2]     int32 or int64, on the pool's device: (source, destination) pairs

Destinations are distinct and none is also a source in the same call: the pairs run in any order. Does not know layouts.
"""

import triton
import triton.language as tl
from torch import Tensor

# 16 KiB in bf16: a 2 MiB block becomes 128 programs, enough for one pair to fill an H200's 132 SMs.
_CHUNK = 8192


def copy_kv_blocks_reference(kv_cache: Tensor, block_copies: Tensor) -> None:
    sources, destinations = block_copies.long().unbind(dim=1)
    kv_cache[destinations] = kv_cache[sources]


@triton.jit
def _copy_kv_blocks_kernel(kv_cache, block_copies, BLOCK_ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(block_copies + 2 * pair).to(tl.int64)
    destination = tl.load(block_copies + 2 * pair + 1).to(tl.int64)
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = elements < BLOCK_ELEMENTS
    values = tl.load(kv_cache + source * BLOCK_ELEMENTS + elements, mask=inside)
    tl.store(kv_cache + destination * BLOCK_ELEMENTS + elements, values, mask=inside)


def copy_kv_blocks_triton(kv_cache: Tensor, block_copies: Tensor) -> None:
    assert kv_cache.is_contiguous() and block_copies.is_contiguous() and block_copies.shape[1:] == (2,)
    block_elements = kv_cache[0].numel()
    grid = (block_copies.shape[0], triton.cdiv(block_elements, _CHUNK))
    _copy_kv_blocks_kernel[grid](
        kv_cache, block_copies, BLOCK_ELEMENTS=block_elements, CHUNK=_CHUNK, num_warps=8
    )


def copy_kv_blocks(kv_cache: Tensor, block_copies: Tensor) -> None:
    if kv_cache.is_cuda:
        copy_kv_blocks_triton(kv_cache, block_copies)
    else:
        copy_kv_blocks_reference(kv_cache, block_copies)
