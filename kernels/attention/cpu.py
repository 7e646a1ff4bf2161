"""Paged attention and the KV store on a CPU, built from torch operators.

It serves steps that the C++ kernels (kernels/cpu/step.py) cannot run. A PagedAttentionPlan is made once per step and
window and shared by all layers. The caches must be `pool[:, layer, 0]` and `pool[:, layer, 1]` of one tensor whose
[BS, D] pieces are contiguous. A cache of another dtype than the queries is gathered first and converted afterwards.
"""
# Operator choices, measured per layer (SmolLM2-135M shape, 2 cores with AVX512_BF16, context 256):
#   - One index_select of [BS * D] rows gathers K and V of 16 sequences in 42 us; `cache[blocks]` takes 275 us.
#   - Decode: bmm, softmax, bmm with the G query heads of a KV head as rows take 133 us for 16 sequences and 75 us for
#   8.
#     scaled_dot_product_attention takes 310 and 158 us, because it calls one small GEMM per head. It wins only for the
#     least work: 49 against 88 us for 1 sequence. bmm rounds bf16 scores before the softmax; the mean error of
#         SmolLM2's
#     logits (deviation 3.2) rises from 0.0586 to 0.0603.
#   - Window: blocks before the window are not gathered. A longer prompt is cut into pieces whose keys span one window
#     more than the piece.
#   - Prefill: scaled_dot_product_attention per sequence never writes the [T, ctx] scores; the G heads are a batch with
#     stride 0 over K and V.

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.cpu_scores import attend_decode, attend_prefill
from kernels.attention.score_rules import NO_RULES, ScoreRules
from kernels.fp8_kv import E4M3, UNIT_SCALES, KVScales, to_e4m3

# A group is split if its padding exceeds both limits. An extra group costs about 45 us per layer, as much as gathering
# 1000 tokens.
_MAX_PADDING_RATIO = 0.25
_MIN_SPLIT_TOKENS = 1024

# Minimum number of query tokens per piece of a prompt with a window; each piece gathers its keys once.
_MIN_PIECE_TOKENS = 256

# oneDNN compiles a kernel per matrix shape; without rounding it would compile at almost every step.
_LENGTH_GRANULARITY_TOKENS = 64


@dataclass(slots=True, frozen=True)
class LayerKV:
    """One layer's keys and values as rows: `blocks` per (block, K or V, head), `slots` per token of such a block."""

    blocks: Tensor  # [R, BS * D]
    slots: Tensor  # [R * BS, D]
    scales: KVScales = UNIT_SCALES  # for rows in e4m3


@dataclass(slots=True, frozen=True)
class CacheLayout:
    """Positions of (block, K or V, head) pieces, in rows of [BS * D] elements from the layer's first element."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    rows_per_block: int
    rows_to_value: int

    @classmethod
    def of(cls, key_cache: Tensor, value_cache: Tensor) -> "CacheLayout":
        _, num_kv_heads, block_size, head_dim = key_cache.shape
        row = block_size * head_dim
        assert key_cache.stride()[1:] == value_cache.stride()[1:] == (row, head_dim, 1)
        distance = value_cache.storage_offset() - key_cache.storage_offset()
        assert distance > 0 and distance % row == 0 and key_cache.stride(0) % row == 0
        return cls(num_kv_heads, block_size, head_dim, key_cache.stride(0) // row, distance // row)

    def layer(self, key_cache: Tensor, scales: KVScales = UNIT_SCALES) -> LayerKV:
        rows = (key_cache.shape[0] - 1) * self.rows_per_block + self.rows_to_value + self.num_kv_heads
        row = self.block_size * self.head_dim
        offset = key_cache.storage_offset()
        return LayerKV(
            blocks=key_cache.as_strided((rows, row), (row, 1), offset),
            slots=key_cache.as_strided((rows * self.block_size, self.head_dim), (self.head_dim, 1), offset),
            scales=scales,
        )

    def rows(self, blocks: np.ndarray) -> np.ndarray:
        """Return the rows of K and V for block tables [S, B], as [2, S, Hkv, B]."""
        heads = np.arange(self.num_kv_heads)[None, None, :, None]
        key_or_value = np.array([0, self.rows_to_value])[:, None, None, None]
        rows: NDArray[Any] = blocks.astype(np.int64)[None, :, None, :] * self.rows_per_block + key_or_value + heads
        return rows


class GatherBuffer:
    """Scratch memory reused by all layers and steps, which avoids page faults on fresh memory."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def rows(self, num_rows: int, row: int, dtype: torch.dtype) -> Tensor:
        """Return a [num_rows, row] view of the scratch memory of this dtype."""
        if dtype not in self._memory or self._memory[dtype].numel() < num_rows * row:
            self._memory[dtype] = torch.empty(num_rows * row, dtype=dtype)
        return self._memory[dtype][: num_rows * row].view(num_rows, row)


@dataclass(slots=True, frozen=True)
class _Group:
    """Sequences computed together: several decoding sequences, or one piece of a prompt."""

    first_token: int
    end_token: int
    rows: Tensor  # of LayerKV.blocks
    gathered: Tensor  # [rows, BS * D], the gather's destination, in the dtype of the queries
    keys: Tensor  # views of `gathered`: decode [S, Hkv, ctx, D], prefill [Hkv, ctx, D]
    values: Tensor
    mask: Tensor | None  # added to the scores: decode [S, 1, 1, ctx], prefill [T, ctx]; None: plain causal
    is_prefill: bool


class PagedAttentionPlan:
    """What all layers of a step with one window share: groups of sequences, gather rows and masks.

    Decoding sequences (one new token) come first, best by ascending length; then sequences with more tokens. Each token
    sees the last `window` keys including its own, or all previous keys if `window` is 0.
    """

    def __init__(
        self,
        layout: CacheLayout,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        dtype: torch.dtype,
        buffer: GatherBuffer,
        window: int = 0,
    ) -> None:
        self._layout = layout
        self._window = window
        self._dtype = dtype
        self._buffer = buffer
        self._block_tables = block_tables.numpy()
        starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        self._starts, self._lengths = starts, lengths
        num_decodes = sum(1 for start, end in pairwise(starts) if end - start == 1)
        assert starts[num_decodes] == num_decodes, "sequences that decode come first"
        visible = [min(length, window or length) for length in lengths[:num_decodes]]
        self._groups = [self._decode_group(first, lengths[first:end]) for first, end in _similar_lengths(visible)]
        for index in range(num_decodes, len(lengths)):
            self._groups += self._prefill_groups(index, starts[index], starts[index + 1], lengths[index])

    def started_blocks(self) -> list[int]:
        """Return the blocks that this step starts but does not fill.

        They must be zeroed before store_kv_cpu(): attention masks unused slots by adding -inf, and a NaN left by an
        earlier owner of the block would stay NaN.
        """
        block_size = self._layout.block_size
        blocks = []
        for index, length in enumerate(self._lengths):
            last_block = (length - 1) // block_size
            first_new = length - (self._starts[index + 1] - self._starts[index])
            if length % block_size and last_block * block_size >= first_new:
                blocks.append(int(self._block_tables[index, last_block]))
        return blocks

    def store_rows(self, slot_mapping: Tensor) -> Tensor:
        """Return the [T, 2 * Hkv] rows of LayerKV.slots for store_kv_cpu()."""
        slots = slot_mapping.numpy()
        rows = self._layout.rows((slots // self._layout.block_size)[:, None])[..., 0]  # [2, T, Hkv]
        offsets = (slots % self._layout.block_size)[:, None, None]
        by_token = rows.transpose(1, 0, 2) * self._layout.block_size + offsets
        return torch.from_numpy(by_token.reshape(len(slots), -1))

    def attend(self, query: Tensor, layer: LayerKV, scale: float, rules: ScoreRules = NO_RULES) -> Tensor:
        """Attend with query [T, Hq * D] and return [T, Hq * D]. This step's keys and values must already be stored."""
        assert rules.window == self._window, "one plan is for layers of one window"
        outputs = [self._attend_group(group, query, layer, scale, rules) for group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_group(self, group: _Group, query: Tensor, layer: LayerKV, scale: float, rules: ScoreRules) -> Tensor:
        self._gather(group, layer)
        query = query[group.first_token : group.end_token]
        num_tokens = len(query)
        query = query.view(num_tokens, self._layout.num_kv_heads, -1, self._layout.head_dim)
        attend = attend_prefill if group.is_prefill else attend_decode
        attended = attend(query, group.keys, group.values, group.mask, scale * layer.scales.key, rules)
        attended = attended.reshape(num_tokens, -1)
        return attended if layer.scales.value == 1.0 else attended.mul_(layer.scales.value)

    def _gather(self, group: _Group, layer: LayerKV) -> None:
        if layer.blocks.dtype == self._dtype:
            torch.index_select(layer.blocks, 0, group.rows, out=group.gathered)
            return
        num_rows, row = group.gathered.shape
        stored = self._buffer.rows(num_rows, row, layer.blocks.dtype)
        torch.index_select(layer.blocks, 0, group.rows, out=stored)
        group.gathered.copy_(stored)

    def _decode_group(self, first: int, lengths: list[int]) -> _Group:
        ends = np.array(lengths)[:, None]
        first_keys = self._first_key(ends - 1)
        first_blocks = first_keys // self._layout.block_size
        offsets = first_blocks * self._layout.block_size
        longest = int((ends - offsets).max())
        context = -(-longest // _LENGTH_GRANULARITY_TOKENS) * _LENGTH_GRANULARITY_TOKENS
        rows, gathered, keys_values = self._gather_target(first, first_blocks[:, 0].tolist(), lengths, context)
        keys, values = keys_values
        positions = np.arange(context)[None, :] + offsets
        visible = (positions >= first_keys) & (positions < ends)
        hidden = np.where(visible, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(hidden)[:, None, None, :].to(self._dtype)
        return _Group(first, first + len(lengths), rows, gathered, keys, values, mask, is_prefill=False)

    def _first_key(self, position: NDArray[Any]) -> NDArray[Any]:
        """Return the first position visible to a token at each position."""
        return np.maximum(position - (self._window - 1), 0) if self._window else np.zeros_like(position)

    def _prefill_groups(self, index: int, first_token: int, end_token: int, length: int) -> Iterator[_Group]:
        """Yield the pieces of a prompt; without a window there is one piece."""
        piece = max(self._window, _MIN_PIECE_TOKENS) if 0 < self._window < length else end_token - first_token
        for first in range(first_token, end_token, piece):
            end = min(first + piece, end_token)
            yield self._prefill_group(index, first, end, length - (end_token - end))

    def _prefill_group(self, index: int, first_token: int, end_token: int, length: int) -> _Group:
        """Build the group of tokens [first_token, end_token); `length` counts the sequence up to the last one."""
        num_new = end_token - first_token
        first_key = int(self._first_key(np.array(length - num_new)))
        first_block = first_key // self._layout.block_size
        offset = first_block * self._layout.block_size
        rows, gathered, keys_values = self._gather_target(index, [first_block], [length], length - offset)
        keys, values = keys_values[:, 0, :, : length - offset]
        mask = None
        if num_new < length or 0 < self._window < length:
            visible = torch.ones(num_new, length - offset, dtype=torch.bool).tril(length - num_new - offset)
            if self._window:
                visible = visible.triu(length - num_new - offset - self._window + 1)
            mask = torch.zeros(num_new, length - offset, dtype=self._dtype).masked_fill_(~visible, -torch.inf)
        return _Group(first_token, end_token, rows, gathered, keys, values, mask, is_prefill=True)

    def _gather_target(
        self, first: int, first_blocks: list[int], lengths: list[int], context: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows to gather, their destination, and the destination as [2, S, Hkv, ctx, D].

        The context is rounded up to whole blocks. `first_blocks` gives each sequence's first gathered block table
        entry.
        """
        layout = self._layout
        num_blocks = -(-context // layout.block_size)
        tables = np.zeros((len(lengths), num_blocks), dtype=np.int64)
        for row, (skipped, length) in enumerate(zip(first_blocks, lengths, strict=True)):
            used = -(-length // layout.block_size)
            tables[row, : used - skipped] = self._block_tables[first + row, skipped:used]
        rows = torch.from_numpy(layout.rows(tables).reshape(-1))
        gathered = self._buffer.rows(len(rows), layout.block_size * layout.head_dim, self._dtype)
        shape = (2, len(lengths), layout.num_kv_heads, num_blocks * layout.block_size, layout.head_dim)
        return rows, gathered, gathered.view(shape)


def store_kv_cpu(key_value: Tensor, layer: LayerKV, store_rows: Tensor) -> None:
    """Store key_value [T, 2 * Hkv, D]: the keys, then the values of each token."""
    if layer.slots.dtype == E4M3:
        keys, values = key_value.chunk(2, dim=1)
        key_value = torch.cat((to_e4m3(keys, layer.scales.key), to_e4m3(values, layer.scales.value)), dim=1)
    layer.slots.index_put_((store_rows,), key_value.to(layer.slots.dtype))


def _similar_lengths(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of `lengths` whose members are padded to the longest one."""
    first, longest = 0, max(lengths[:1], default=0)
    for end in range(1, len(lengths)):
        longest = max(longest, lengths[end])
        area = (end + 1 - first) * longest
        padding = area - sum(lengths[first : end + 1])
        if padding > _MIN_SPLIT_TOKENS and padding > _MAX_PADDING_RATIO * area:
            yield first, end
            first, longest = end, lengths[end]
    if lengths:
        yield first, len(lengths)
