"""The plan shared by the decode kernels of all layers in a step: the list of splits and room for their results.

A sequence with one new token, or the few of a joined row (joined_rows.py), is cut into splits of its keys, one item
each; a sequence's items are consecutive. The cuts depend only on the sequence's own length, so other sequences in the
batch cannot change its result. Keys outside the window are in no split. A launch never waits for the device:
`max_seq_len` bounds the room, and the length of the list stays on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.joined_rows import JoinedRows, decoding_queries

# int32 fields of an item: sequence, first row of query and output, first key, end key, splits of the sequence, first
# visible key, queries, keys of the sequence. The sixth is used with a window, and the last two with several queries.
ITEM_FIELDS = 8  # 32 bytes per item are one sector
# Shorter splits do less between two loads of a query; longer ones leave SMs idle at batch 1 (ADR 0024).
MIN_SPLIT_TOKENS = 256
MAX_SHORT_SPLIT_TOKENS = 768
MAX_SPLITS = 32
# Splits start at multiples of this. It must be a multiple of every key tile and every block size.
SPLIT_ALIGNMENT_TOKENS = 128
SEQUENCES_COUNTED_AT_ONCE = 512


@dataclass(frozen=True)
class DecodePlan:
    items: Tensor  # [max_items, ITEM_FIELDS] int32
    num_items: Tensor  # [1] int32
    sequence_items: Tensor  # [S, 2] int32: first item, number of items
    query_start_loc: Tensor  # [S + 1] int32, of the joined rows
    split_outputs: Tensor  # [max_items, max_queries, Hq, D] float32, normalized per split
    split_lse: Tensor  # [max_items, max_queries, Hq] float32, log2 of the sum of exponentials
    max_queries: int


@triton.jit
def _splits(
    decodes, num_keys,
    MIN_SPLIT_TOKENS: tl.constexpr, MAX_SHORT_SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Return (number of splits, keys per split).

    A row without keys has one empty split, which writes its zeros. A sequence that does not decode has none.
    """
    split_tokens = tl.minimum(tl.maximum(tl.cdiv(num_keys, 8), MIN_SPLIT_TOKENS), MAX_SHORT_SPLIT_TOKENS)
    split_tokens = tl.cdiv(tl.maximum(split_tokens, tl.cdiv(num_keys, MAX_SPLITS)), ALIGNMENT) * ALIGNMENT
    return tl.where(decodes, tl.maximum(tl.cdiv(num_keys, split_tokens), 1), 0), split_tokens


@triton.jit
def _first_visible(seq_len, query_len, WINDOW: tl.constexpr):
    """Return the first key in the window of the first query."""
    return tl.maximum(seq_len - (query_len - 1) - WINDOW, 0)


@triton.jit
def _hidden(seq_len, query_len, ALIGNMENT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of keys before all windows, rounded down to where a split may start."""
    return _first_visible(seq_len, query_len, WINDOW) // ALIGNMENT * ALIGNMENT if WINDOW > 0 else 0


@triton.jit(do_not_specialize=["num_sequences"])
def plan_decode_kernel(
    query_start_loc, joined, seq_lens, items, num_items, sequence_items, num_sequences,
    MIN_SPLIT_TOKENS: tl.constexpr, MAX_SHORT_SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ALIGNMENT: tl.constexpr, ITEM_FIELDS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
    WINDOW: tl.constexpr, MAX_QUERIES: tl.constexpr,
):  # fmt: skip
    """Count the splits of the sequences before this program's sequence, then write its own."""
    sequence = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SEQUENCES)
    before = tl.zeros([BLOCK_SEQUENCES], dtype=tl.int32)
    for start in range(0, sequence, BLOCK_SEQUENCES):
        others = start + lanes
        inside = others < sequence
        decodes, query_len = decoding_queries(query_start_loc, joined, others, inside)
        seq_len = tl.load(seq_lens + others, mask=inside, other=0)
        keys = seq_len - _hidden(seq_len, query_len, ALIGNMENT, WINDOW)
        counts, _ = _splits(decodes, keys, MIN_SPLIT_TOKENS, MAX_SHORT_SPLIT_TOKENS, MAX_SPLITS, ALIGNMENT)
        before += tl.where(inside, counts, 0)
    first_item = tl.sum(before, axis=0)
    row = tl.load(joined + sequence)
    decodes, query_len = decoding_queries(query_start_loc, joined, sequence, True)
    seq_len = tl.load(seq_lens + sequence)
    hidden = _hidden(seq_len, query_len, ALIGNMENT, WINDOW)
    count, split_tokens = _splits(
        decodes, seq_len - hidden, MIN_SPLIT_TOKENS, MAX_SHORT_SPLIT_TOKENS, MAX_SPLITS, ALIGNMENT
    )
    split = tl.arange(0, MAX_SPLITS)
    mine = split < count
    item = items + (first_item + split) * ITEM_FIELDS
    same = tl.zeros([MAX_SPLITS], dtype=tl.int32)
    tl.store(item, same + sequence, mask=mine)
    tl.store(item + 1, same + row, mask=mine)
    tl.store(item + 2, hidden + split * split_tokens, mask=mine)
    tl.store(item + 3, tl.minimum(hidden + split * split_tokens + split_tokens, seq_len), mask=mine)
    tl.store(item + 4, same + count, mask=mine)
    if WINDOW > 0:
        tl.store(item + 5, same + _first_visible(seq_len, query_len, WINDOW), mask=mine)
    if MAX_QUERIES > 1:
        tl.store(item + 6, same + query_len, mask=mine)
        tl.store(item + 7, same + seq_len, mask=mine)
    tl.store(sequence_items + sequence * 2, first_item)
    tl.store(sequence_items + sequence * 2 + 1, count)
    if sequence == num_sequences - 1:
        tl.store(num_items, first_item + count)


def plan_decode(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    num_heads: int,
    head_dim: int,
    window: int = 0,
    joined: JoinedRows | None = None,
) -> DecodePlan:
    """Plan the splits of one step.

    Args:
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        max_seq_len: Upper bound of seq_lens, known to the host.
        num_heads: Query heads.
        head_dim: Elements per head.
        window: Visible keys per token; 0: all.
        joined: The rows with those of one sequence joined; None: each row for itself.
    """
    joined = joined or JoinedRows(query_start_loc, 1)
    max_queries = joined.max_queries
    num_sequences = seq_lens.shape[0]
    if window:
        max_seq_len = min(max_seq_len, window + max_queries - 1 + SPLIT_ALIGNMENT_TOKENS)
    max_items = num_sequences * max(1, min(triton.cdiv(max_seq_len, MIN_SPLIT_TOKENS), MAX_SPLITS))
    plan = DecodePlan(
        items=seq_lens.new_empty(max_items, ITEM_FIELDS),
        num_items=seq_lens.new_empty(1),
        sequence_items=seq_lens.new_empty(num_sequences, 2),
        query_start_loc=joined.query_start_loc,
        split_outputs=seq_lens.new_empty(max_items, max_queries, num_heads, head_dim, dtype=torch.float32),
        split_lse=seq_lens.new_empty(max_items, max_queries, num_heads, dtype=torch.float32),
        max_queries=max_queries,
    )
    plan_decode_kernel[(num_sequences,)](
        query_start_loc,
        joined.query_start_loc,
        seq_lens,
        plan.items,
        plan.num_items,
        plan.sequence_items,
        num_sequences,
        MIN_SPLIT_TOKENS=MIN_SPLIT_TOKENS,
        MAX_SHORT_SPLIT_TOKENS=MAX_SHORT_SPLIT_TOKENS,
        MAX_SPLITS=MAX_SPLITS,
        ALIGNMENT=SPLIT_ALIGNMENT_TOKENS,
        ITEM_FIELDS=ITEM_FIELDS,
        BLOCK_SEQUENCES=SEQUENCES_COUNTED_AT_ONCE,
        WINDOW=window,
        MAX_QUERIES=max_queries,
        num_warps=4,
    )
    return plan
