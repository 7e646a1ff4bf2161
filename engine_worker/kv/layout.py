"""The layout of a model's KV in blocks, with the only formula of its bytes.

Layers with the same window form groups of equally many layers, so that the blocks of all groups have one size and share
one pool (ADR 0145). A layer has a place in the blocks of its group. The KV dtype is independent of the weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine_worker.kv.span import KVSpan, KVSpans

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


# A decode step loops over the groups at each block edge, so more groups cost more than the padding that they save.
MAX_GROUPS = 8
_LONG_TOKENS = 32_768  # groups are chosen for the smallest KV of one sequence of this length
_STATES_RATIO = 0.4  # a state has the bytes of 2,400 to 3,200 tokens of KV, and each running sequence needs one
_STATES_PER_SEQUENCE, _MIN_STATES = 4, 8


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """Layers whose keys and values of a token are in one block, and leave it together."""

    layers: tuple[int, ...]  # indices in the model; each has its place in this order
    num_places: int = 0  # layers that a block has room for; 0: as many as there are
    num_kv_heads: int
    head_dim: int
    dtype: str  # key of ITEMSIZES
    window: int = 0  # tokens visible to a token, including itself; 0: all before it in at least one layer

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return [P, 2, Hkv, BS, D], one block with the keys and values of P places."""
        return self.num_places or len(self.layers), 2, self.num_kv_heads, block_size, self.head_dim

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)) * ITEMSIZES[self.dtype]


Place = tuple[int, int]  # of a layer: its group, and its place in the blocks of the group


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The groups of a model and the tokens per block. Blocks of all groups have the same shape."""

    groups: tuple[KVGroup, ...]
    block_size: int  # tokens
    state_shape: tuple[int, int] = (0, 0)  # recurrent layers, and float32 elements of the state of each

    def __post_init__(self) -> None:
        shapes = {(group.block_shape(self.block_size), group.dtype) for group in self.groups}
        assert len(shapes) == 1, f"blocks of one pool must have one shape, not {sorted(shapes)}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of any group; one pool serves all groups."""
        return self.groups[0].block_bytes(self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes per token inside all windows, over all groups."""
        return sum(group.block_bytes(1) for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence; 0: the model has none."""
        return math.prod(self.state_shape) * 4

    @property
    def dtype(self) -> str:
        """A key of ITEMSIZES."""
        return self.groups[0].dtype

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of each layer, by its index in the model."""
        found = {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` of one sequence without windows, rounded up."""
        return len(self.groups) * -(-num_tokens // self.block_size)

    def spans(self, max_new_tokens: int) -> KVSpans:
        """Return the spans of all groups; `max_new_tokens`: the maximum number of a sequence's tokens per step."""
        return KVSpans.of([group.window for group in self.groups], self.block_size, max_new_tokens)

    def max_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the maximum number of blocks of one sequence, over all groups.

        Args:
            num_tokens: Final length of the sequence.
            max_new_tokens: Maximum number of its tokens per step.
        """
        return self.spans(max_new_tokens).max_blocks(num_tokens)

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, P, 2, Hkv, BS, D]."""
        return num_blocks, *self.groups[0].block_shape(self.block_size)


def group_layers(windows: Sequence[int], max_groups: int = MAX_GROUPS) -> list[tuple[int, tuple[int, ...]]]:
    """Divide layers into groups; return per group its window and its layers, at most `num_places` each.

    All groups have room for equally many layers. That number is the one with the smallest KV of a sequence of 32,768
    tokens, among those with at most `max_groups` groups; of equal ones the largest. If there is none, all layers form
    one group, with the widest window.

    Args:
        windows: Per layer, in tokens; 0: none.
        max_groups: Upper bound of the groups.
    """
    layers_of: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    counts = Counter(windows)
    candidates = [size for size in range(1, max(counts.values()) + 1) if _num_groups(counts, size) <= max_groups]
    if not candidates:
        return [(0 if 0 in counts else max(counts), tuple(range(len(windows))))]
    size = min(candidates, key=lambda size: (_num_kept(counts, size), -size))
    return [
        (window, tuple(layers[first : first + size]))
        for window, layers in layers_of.items()
        for first in range(0, len(layers), size)
    ]


def _num_groups(counts: Counter[int], size: int) -> int:
    return sum(-(-count // size) for count in counts.values())


def _num_kept(counts: Counter[int], size: int) -> int:
    """Return the tokens that all places of a long sequence keep, empty places included."""
    spans = {window: KVSpan(1, window).max_blocks(_LONG_TOKENS) for window in counts}
    return sum(-(-count // size) * size * spans[window] for window, count in counts.items())


def num_state_blocks_that_fit(budget_bytes: int, state_bytes: int, max_num_seqs: int) -> int:
    """Return the number of blocks of the state pool, including block 0; 0 if the model has no recurrent layers.

    They are a live state and three checkpoints per running slot, within 40 % of the budget, but at least eight.
    """
    if not state_bytes:
        return 0
    fitting = int(budget_bytes * _STATES_RATIO) // state_bytes
    return min(max(fitting, _MIN_STATES + 1), _STATES_PER_SEQUENCE * max_num_seqs + 1)


def num_host_state_blocks_that_fit(swap_space_bytes: int, state_bytes: int) -> int:
    """Return the number of state blocks in host memory, with its unused block 0, in 40 % of it; 0 for no pool."""
    fitting = int(swap_space_bytes * _STATES_RATIO) // state_bytes if state_bytes else 0
    return fitting if fitting > 1 else 0
