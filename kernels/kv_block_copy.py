"""Copy whole KV blocks on the device: within one pool (copy-on-write), or from a pool to a staging buffer."""

import triton
import triton.language as tl
from torch import Tensor

# 16 KiB in bf16: a 2 MiB block becomes 128 programs, so one pair nearly fills an H200's 132 SMs.
_CHUNK = 8192


def copy_kv_blocks_reference(source: Tensor, target: Tensor, block_copies: Tensor) -> None:
    sources, destinations = block_copies.long().unbind(dim=1)
    target[destinations] = source[sources]


@triton.jit
def _copy_kv_blocks_kernel(source, target, block_copies, BLOCK_ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    pair = tl.program_id(0)
    source_block = tl.load(block_copies + 2 * pair).to(tl.int64)
    target_block = tl.load(block_copies + 2 * pair + 1).to(tl.int64)
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = elements < BLOCK_ELEMENTS
    values = tl.load(source + source_block * BLOCK_ELEMENTS + elements, mask=inside)
    tl.store(target + target_block * BLOCK_ELEMENTS + elements, values, mask=inside)


def copy_kv_blocks_triton(source: Tensor, target: Tensor, block_copies: Tensor) -> None:
    assert source.is_contiguous() and target.is_contiguous() and source.shape[1:] == target.shape[1:]
    assert block_copies.is_contiguous() and block_copies.shape[1:] == (2,)
    block_elements = source[0].numel()
    grid = (block_copies.shape[0], triton.cdiv(block_elements, _CHUNK))
    _copy_kv_blocks_kernel[grid](source, target, block_copies, BLOCK_ELEMENTS=block_elements, CHUNK=_CHUNK, num_warps=8)


def copy_kv_blocks(source: Tensor, target: Tensor, block_copies: Tensor) -> None:
    """Copy blocks of `source` into `target`.

    Destinations are distinct and, within one pool, none is also a source: the pairs run in any order.

    Args:
        source: [N, ...], contiguous pool; a block is everything after the first dimension.
        target: [M, ...], contiguous, blocks of the same shape; may be `source`.
        block_copies: [P, 2], int32 or int64, (source, destination) pairs on the pools' device.
    """
    if source.is_cuda:
        copy_kv_blocks_triton(source, target, block_copies)
    else:
        copy_kv_blocks_reference(source, target, block_copies)
