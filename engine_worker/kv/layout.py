"""The layout of a model's KV in blocks, with the only formula of its bytes.

The KV dtype is independent of the weights. All models have one group: with their widest window, or with none if a layer
has none (ADR 0145).
"""

import math
from dataclasses import dataclass

from engine_worker.kv.span import KVSpan

# Bytes per element of the KV dtypes.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_TYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip
# Values of --kv-cache-dtype, in vLLM's words. `auto` is the model's dtype unless kv_dtype_choice.py overrides it.
KV_CACHE_DTYPES = ("auto", *_TYPES)


def kv_cache_dtype(wanted: str, model_dtype: str) -> str:
    """Return the KV dtype, a key of ITEMSIZES, for a value of KV_CACHE_DTYPES and the model's dtype."""
    return _TYPES.get(wanted, model_dtype)


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers that keep keys and values of one shape and dtype for the same tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # key of ITEMSIZES
    window: int = 0  # tokens visible to a token, including itself; 0: all before it

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return [L, 2, Hkv, BS, D], one block with the keys and values of the group's layers."""
        return self.num_layers, 2, self.num_kv_heads, block_size, self.head_dim

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The groups of a model and the tokens per block. Blocks of all groups have the same size."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens

    def __post_init__(self) -> None:
        sizes = {group.block_bytes(self.block_size) for group in self.groups}
        assert len(sizes) == 1, f"blocks of one pool must have one size, not {sorted(sizes)} bytes"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of any group; one pool serves all groups."""
        return self.groups[0].block_bytes(self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes per token, over all groups."""
        return sum(group.block_bytes(1) for group in self.groups)

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` of one sequence, rounded up."""
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the maximum number of blocks of one sequence.

        Args:
            num_tokens: Final length of the sequence.
            max_new_tokens: Maximum number of its tokens per step.
        """
        spans = (KVSpan(self.block_size, group.window, max_new_tokens) for group in self.groups)
        return sum(span.max_blocks(num_tokens) for span in spans)

    def pool_shape(self, group: KVGroup, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, L, 2, Hkv, BS, D]."""
        return num_blocks, *group.block_shape(self.block_size)
