"""Which part of a sequence has its KV in blocks: all of it, or the window and the tokens of the next step.

Example with window 3, blocks of 2 tokens, 7 tokens computed and at most 2 new tokens per step:

    block      0     1     2     3     4
    tokens   [0 1] [2 3] [4 5] [6 .] [. .]        the next token, 7, sees 5 and 6
             outside     first_block      num_blocks(7, 12) = 5
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class KVSpan:
    """The single rule for block tables, prefix cache hits and the capacity of a worker."""

    block_size: int
    window: int = 0  # tokens visible to a token, including itself; 0: all before it
    max_new_tokens: int = 1  # of a sequence per step; with a window, a table covers only the next step

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")

    def first_block(self, num_computed_tokens: int) -> int:
        """Return the first block visible to the next token or any later one."""
        return max(0, num_computed_tokens - self.window + 1) // self.block_size if self.window else 0

    def num_blocks(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return the block table length needed by the next step, including blocks outside the window."""
        if self.window:
            num_tokens = min(num_tokens, num_computed_tokens + self.max_new_tokens)
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Return the maximum number of blocks held at once while a sequence grows to `num_tokens`.

        A block is released when it is full, so the maximum covers the window at any offset, the step, and one block
        between.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if not self.window:
            return num_blocks
        seen, new = (-(-(count - 1) // self.block_size) for count in (self.window, self.max_new_tokens))
        return min(num_blocks, seen + new + 1)

    def longest_hit(
        self, keys: Sequence[Key], find: Callable[[Key], int | None], start: int = 0
    ) -> tuple[int, list[int]]:
        """Return the longest available prefix of the full blocks `keys` as (first needed block, block ids).

        Without a window, all blocks of a prefix are needed; with one, only those visible to the next token.

        Args:
            keys: Keys of the full blocks, in order.
            find: Returns the id of an available block, or None; called at most once per key.
            start: Prefixes of up to this many blocks are not searched (with a window).
        """
        if not self.window:
            block_ids = []
            for key in keys:
                if (block_id := find(key)) is None:
                    break
                block_ids.append(block_id)
            return 0, block_ids
        end = len(keys)
        while end > start:
            first, block_ids = self.first_block(end * self.block_size), []
            for index in range(end - 1, first - 1, -1):
                if (block_id := find(keys[index])) is None:
                    end = index
                    break
                block_ids.append(block_id)
            else:
                return first, block_ids[::-1]
        return start, []


@dataclass(frozen=True, slots=True)
class KVSpans:
    """The spans of all groups of a model, and how many blocks sequences hold in them together."""

    groups: tuple[KVSpan, ...]

    @classmethod
    def of(cls, windows: Sequence[int], block_size: int, max_new_tokens: int = 1) -> "KVSpans":
        """Return the spans of groups with these windows; see KVSpan."""
        return cls(tuple(KVSpan(block_size, window, max_new_tokens) for window in windows))

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    def max_blocks(self, num_tokens: int, num_shared_tokens: int = 0, num_sequences: int = 1) -> int:
        """Return the maximum number of blocks held at once while sequences grow to `num_tokens` each.

        They share the full blocks of their first `num_shared_tokens`, and may share nothing else.
        """
        num_blocks, num_shared = -(-num_tokens // self.block_size), num_shared_tokens // self.block_size
        num_shared_and_own = num_shared + num_sequences * (num_blocks - num_shared)
        return sum(min(num_shared_and_own, num_sequences * span.max_blocks(num_tokens)) for span in self.groups)

    def max_tokens(self, num_blocks: int, limit: int, num_shared_tokens: int = 0, num_sequences: int = 1) -> int:
        """Return the length up to `limit` to which sequences can grow with `num_blocks`; see max_blocks().

        A length below the limit is a whole number of blocks.
        """
        num_needed = partial(self.max_blocks, num_shared_tokens=num_shared_tokens, num_sequences=num_sequences)
        if num_needed(limit) <= num_blocks:
            return limit
        ends = range(0, limit + self.block_size, self.block_size)
        return min(limit, ends[bisect_right(ends, num_blocks, key=num_needed) - 1])

    def own_blocks(self, num_tokens: int, num_shared_tokens: int) -> int:
        """Return the maximum number of blocks of a sequence beside the full ones of its first `num_shared_tokens`."""
        num_own = -(-num_tokens // self.block_size) - num_shared_tokens // self.block_size
        return sum(min(num_own, span.max_blocks(num_tokens)) for span in self.groups)
