"""Keys and values of an e4m3 cache as float16, for one layer's prefill of a small step.

Warp-group products read keys and values from shared memory in 16 bits, and the Hopper kernel has no registers left to
convert them on the way. Written once and read again, they are a small part of a prefill: 8192 keys of an 8B model's
layer are 34 MB, beside 0.9 ms of products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Over all sequences of a step, each counted with the longest length: 134 MB for a layer of an 8B model.
MAX_WIDENED_TOKENS = 32768
_CHUNK = 8192  # elements per program


@triton.jit
def widen_kernel(
    key_cache, block_ids, widened, block_stride,
    VALUE_OFFSET: tl.constexpr, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Convert one chunk of a block's keys and values, for program (block, chunk)."""
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
        """Return whether a step is small enough to convert."""
        return num_sequences * max_seq_len <= MAX_WIDENED_TOKENS

    def __init__(
        self,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        block_size: int,
        window: int = 0,
    ) -> None:
        """Choose the blocks of one step.

        Args:
            block_tables: [S, B], int32.
            query_start_loc: [S + 1], int32.
            seq_lens: [S], int32, in tokens.
            max_seq_len: Upper bound of seq_lens.
            block_size: Slots per block.
            window: Blocks that no new token's window reaches are skipped; 0: all blocks are used.
        """
        num_blocks = min(triton.cdiv(max_seq_len, block_size), block_tables.shape[1])
        starts = torch.arange(num_blocks, dtype=torch.int32, device=seq_lens.device) * block_size
        is_used = (starts < seq_lens[:, None]) & (query_start_loc.diff() > 1)[:, None]
        if window:
            is_used &= starts + block_size > (seq_lens - query_start_loc.diff() - window + 1)[:, None]
        self._block_ids = block_tables[: len(seq_lens), :num_blocks].masked_fill(~is_used, -1).contiguous()
        places = torch.arange(self._block_ids.numel(), dtype=torch.int32, device=seq_lens.device)
        self.block_tables = places.view_as(self._block_ids)

    def caches(self, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a layer's keys and values.

        Args:
            key_cache: [N, Hkv, BS, D], e4m3; the heads of a block are contiguous.
            value_cache: [N, Hkv, BS, D], with the strides of key_cache.

        Returns:
            Two [S * B, Hkv, BS, D], float16, addressed by `self.block_tables` [S, B]. Only used blocks of sequences
            with several new tokens are defined.
        """
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
