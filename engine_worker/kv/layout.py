"""How the KV of a model lies in blocks: the one place with a formula of its bytes.

    KVGroup    layers that keep keys and values of one shape and type, for the same tokens
    KVLayout   the groups of a model and the tokens in a block

The type of keys and values is the layout's own, whatever that of the weights. All models have one group today: with
their widest window, or with none if a layer has none (ADR 0145). Used by the estimate before any weight is read, by the
loader and by the pool. It knows no sequence, no tensor and no device.
"""

import math
from dataclasses import dataclass

from engine_worker.kv.span import KVSpan

# Of the types that keys and values are kept in.
ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_TYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip
# What --kv-cache-dtype may be, in vLLM's words; `auto` is the type that the model computes in, unless
# execution/kv_dtype_choice.py knows better.
KV_CACHE_DTYPES = ("auto", *_TYPES)


def kv_cache_dtype(wanted: str, model_dtype: str) -> str:
    """One of ITEMSIZES, for one of KV_CACHE_DTYPES and the type that the model computes in."""
    return _TYPES.get(wanted, model_dtype)


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of ITEMSIZES
    window: int = 0  # of so many tokens, itself among them, each token sees the KV; 0: of all before it

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """[L, 2, Hkv, BS, D] of one block: keys and values of all layers of the group."""
        return self.num_layers, 2, self.num_kv_heads, block_size, self.head_dim

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)) * ITEMSIZES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    block_size: int  # tokens

    def __post_init__(self) -> None:
        sizes = {group.block_bytes(self.block_size) for group in self.groups}
        assert len(sizes) == 1, f"blocks of one pool are equally long; these have {sorted(sizes)} bytes"

    @property
    def block_bytes(self) -> int:
        """A block of any group: one pool serves all."""
        return self.groups[0].block_bytes(self.block_size)

    @property
    def token_bytes(self) -> int:
        """The bytes that one token more takes in all groups."""
        return sum(group.block_bytes(1) for group in self.groups)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` of one sequence, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """The most that one sequence holds while it grows to `num_tokens`, at most `max_new_tokens` in a step."""
        spans = (KVSpan(self.block_size, group.window, max_new_tokens) for group in self.groups)
        return sum(span.most_blocks(num_tokens) for span in spans)

    def pool_shape(self, group: KVGroup, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, L, 2, Hkv, BS, D]"""
        return num_blocks, *group.block_shape(self.block_size)
