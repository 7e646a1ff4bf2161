"""The KV pool as TMA sees it on a Hopper GPU: rows of 16-bit elements; an e4m3 pool is one of pairs."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.dependent_launch import dependent_launch
from kernels.fp8_kv import E4M3

COLUMNS = 64  # per copy: 128 bytes, the width of the swizzle
_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int16: gl.int16}
MAX_HEADS_PER_KV_HEAD = 16  # the rows of a product in the decode kernel


def supports_tma(key_cache: Tensor, num_heads: int) -> bool:
    """Return whether the Hopper kernels serve these heads.

    They need heads of 64 or 128 in half precision or e4m3, and contiguous blocks of 8 to 128 slots, a power of two.
    """
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    return (
        dependent_launch(key_cache)["DEPENDENT"]
        and key_cache.dtype in {torch.bfloat16, torch.float16, E4M3}
        and head_dim in {64, 128}
        and block_size in {8, 16, 32, 64, 128}
        and num_heads // num_kv_heads <= MAX_HEADS_PER_KV_HEAD
        and key_cache.stride(2) == head_dim
        and all(stride % head_dim == 0 for stride in key_cache.stride()[:2])
    )


class PoolRows:
    def __init__(self, key_cache: Tensor, value_cache: Tensor) -> None:
        """View a layer's keys and values as rows of one tensor.

        `block_rows`, `head_rows` and `value_rows` are the rows from block to block, head to head and key to value.
        """
        head_dim = key_cache.shape[3]
        value_offset = value_cache.storage_offset() - key_cache.storage_offset()
        assert value_offset > 0 and value_offset % head_dim == 0
        self.block_rows, self.head_rows = (stride // head_dim for stride in key_cache.stride()[:2])
        self.value_rows = value_offset // head_dim
        sizes = zip(key_cache.shape[:3], key_cache.stride()[:3], strict=True)
        last_key = sum((size - 1) * stride for size, stride in sizes)
        self.num_rows = (last_key + value_offset) // head_dim + 1
        assert self.num_rows < 2**31, "places of a copy are int32"
        self._rows = key_cache.as_strided((self.num_rows, head_dim), (head_dim, 1))

    def boxes(self, slots: int) -> TensorDescriptor:
        """Return a descriptor for copies of [slots, 64], laid out for the tensor cores."""
        columns = min(COLUMNS, self._rows.shape[1])
        return TensorDescriptor.from_tensor(self._rows, [slots, columns], _layout(slots, columns, self._rows.dtype))


@cache
def _layout(slots: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([slots, columns], _KINDS[dtype])
