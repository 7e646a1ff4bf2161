"""Keys and values in e4m3 as float16 for one layer's prefill, where those of all prompts of a step are few.

    WidenedBlocks(block_tables, query_start_loc, seq_lens, max_seq_len, block_size, window)      once a step
        widened.block_tables [S, B]                     of what follows
        widened.caches(key_cache, value_cache) -> two [S * B, Hkv, BS, D] float16; only blocks in use of sequences
                                                  with several new tokens are defined

Warp-group products take keys and values from shared memory in 16 bits, and the kernel for Hopper has no registers left
to widen them on their way there. Written once and read again they are a small part of a prefill: 8192 keys are 34 MB of
an 8B model's layer, beside 0.9 ms of products. On a block's walk, where a layer reads it: paged_attention.py asks for
it. It knows no query.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of all sequences of a step, each as long as the longest: 134 MB of an 8B model's layer, next to what a step needs.
MOST_WIDENED_TOKENS = 32768
_CHUNK = 8192  # elements at once


@triton.jit
def widen_kernel(
    key_cache, block_ids, widened, block_stride,
    VALUE_OFFSET: tl.constexpr, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program = (block, chunk of its keys and of its values)."""
    index = tl.program_id(0)
    block = tl.load(block_ids + index).to(tl.int64)
    lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = (lanes < ELEMENTS) & (block >= 0)
    source = key_cache + block * block_stride + lanes
    target = widened + tl.cast(index, tl.int64) * (2 * ELEMENTS) + lanes
    tl.store(target, tl.load(source, mask=inside, other=0.0).to(tl.float16), mask=inside)
    values = tl.load(source + VALUE_OFFSET, mask=inside, other=0.0)
    tl.store(target + ELEMENTS, values.to(tl.float16), mask=inside)


class WidenedBlocks:
    @staticmethod
    def suit(num_sequences: int, max_seq_len: int) -> bool:
        return num_sequences * max_seq_len <= MOST_WIDENED_TOKENS

    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        block_size: int,
        window: int = 0,
    ) -> None:
        """`window`: blocks that no new token's reaches are not widened either; 0: all are reached."""
        num_blocks = min(triton.cdiv(max_seq_len, block_size), block_tables.shape[1])
        starts = torch.arange(num_blocks, dtype=torch.int32, device=seq_lens.device) * block_size
        is_used = (starts < seq_lens[:, None]) & (query_start_loc.diff() > 1)[:, None]
        if window:
            is_used &= starts + block_size > (seq_lens - query_start_loc.diff() - window + 1)[:, None]
        self._block_ids = block_tables[: len(seq_lens), :num_blocks].masked_fill(~is_used, -1).contiguous()
        places = torch.arange(self._block_ids.numel(), dtype=torch.int32, device=seq_lens.device)
        self.block_tables = places.view_as(self._block_ids)

    def caches(self, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Widen a layer's. The heads of a block must lie in one piece."""
        num_kv_heads, block_size, head_dim = key_cache.shape[1:]
        assert key_cache.stride()[1:] == (block_size * head_dim, head_dim, 1)
        num_blocks, elements = self._block_ids.numel(), num_kv_heads * block_size * head_dim
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        widened = key_cache.new_empty(shape, dtype=torch.float16)
        chunk = min(_CHUNK, triton.next_power_of_2(elements))
        widen_kernel[(num_blocks, triton.cdiv(elements, chunk))](
            key_cache,
            self._block_ids,
            widened,
            key_cache.stride(0),
            VALUE_OFFSET=value_cache.storage_offset() - key_cache.storage_offset(),
            ELEMENTS=elements,
            CHUNK=chunk,
            num_warps=8,
        )
        return widened[:, 0], widened[:, 1]
