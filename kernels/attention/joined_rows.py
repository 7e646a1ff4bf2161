"""Joins rows of one token that continue each other in the same blocks, such as a token and its drafts.

The keys of a sequence are read once per row. Joined, the rows of consecutive tokens are one row with several queries.
Only the starts change: in a group of rows, all but the last become empty, and the last has the queries of all. Its
length and its block table are those of its last token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DECODE_TILE_ROWS = 16
LANES = 16  # rows compared at once: a token and up to seven drafts are one step


@dataclass(frozen=True)
class JoinedRows:
    query_start_loc: Tensor  # [S + 1] int32
    max_queries: int  # of a joined row


@triton.jit
def _continues(
    query_start_loc, seq_lens, block_tables, row, num_rows, table_stride,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return whether the row after `row` has the next token of the same sequence.

    Both have one token. The block to which the first writes is in both tables, and only one sequence writes to a block.
    """
    inside = (row >= 0) & (row + 1 < num_rows)
    start = tl.load(query_start_loc + row, mask=inside, other=0)
    middle = tl.load(query_start_loc + row + 1, mask=inside, other=0)
    end = tl.load(query_start_loc + row + 2, mask=inside, other=0)
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    next_len = tl.load(seq_lens + row + 1, mask=inside, other=0)
    follows = inside & (middle - start == 1) & (end - middle == 1) & (seq_len > 0) & (next_len == seq_len + 1)
    place = row.to(tl.int64) * table_stride + (seq_len - 1) // BLOCK_SIZE
    block = tl.load(block_tables + place, mask=follows, other=-1)
    return follows & (tl.load(block_tables + place + table_stride, mask=follows, other=-2) == block)


@triton.jit
def decoding_queries(query_start_loc, joined, row, inside):
    """Return (whether the row decodes, its queries after joining). A row of a prompt does not decode, and is as it was.

    A row whose queries are those of a later one does not decode, either.
    """
    new_tokens = tl.load(query_start_loc + row + 1, mask=inside, other=0)
    new_tokens -= tl.load(query_start_loc + row, mask=inside, other=0)
    queries = tl.load(joined + row + 1, mask=inside, other=0) - tl.load(joined + row, mask=inside, other=0)
    return (new_tokens == 1) & (queries > 0), queries


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def join_rows_kernel(
    query_start_loc, seq_lens, block_tables, joined, num_rows, table_stride,
    MAX_QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the end of one row."""
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    # Rows before this one that it continues.
    before, compared = 0, LANES
    while compared == LANES:
        rows = row - 1 - before - lanes
        continues = _continues(query_start_loc, seq_lens, block_tables, rows, num_rows, table_stride, BLOCK_SIZE)
        compared = tl.min(tl.where(continues, LANES, lanes), axis=0)
        before += compared
    is_continued = _continues(query_start_loc, seq_lens, block_tables, row, num_rows, table_stride, BLOCK_SIZE)
    place = before % MAX_QUERIES
    is_last = (place == MAX_QUERIES - 1) | (is_continued == 0)
    tl.store(joined + row + 1, tl.load(query_start_loc + tl.where(is_last, row + 1, row - place)))
    if row == 0:
        tl.store(joined, tl.load(query_start_loc))


def most_queries(max_joined: int, group: int, one_kernel: bool) -> int:
    """Return how many rows to join at most, for `group` query heads per KV head.

    In the decode kernels, the queries of one KV head must fit into a tile of 16 rows, the smallest of a product.
    """
    return max_joined if one_kernel else max(1, min(max_joined, DECODE_TILE_ROWS // group))


def join_rows(
    query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int, max_queries: int
) -> JoinedRows:
    """Join at most `max_queries` rows of one token at a time; see the module.

    Args:
        query_start_loc: [S + 1], int32.
        seq_lens: [S], int32, in tokens.
        block_tables: [S, B], int32.
        block_size: Slots per block.
        max_queries: Most queries of a joined row.
    """
    joined = torch.empty_like(query_start_loc)
    join_rows_kernel[(len(seq_lens),)](
        query_start_loc,
        seq_lens,
        block_tables,
        joined,
        len(seq_lens),
        block_tables.stride(0),
        MAX_QUERIES=max_queries,
        BLOCK_SIZE=block_size,
        LANES=LANES,
        num_warps=1,
    )
    return JoinedRows(joined, max_queries)
