"""Which part of a sequence has its KV in blocks: all of it, or what a window still sees and the next step adds.

    window 3, blocks of 2, 7 tokens computed, 2 at most in a step:

    block      0     1     2     3     4
    tokens   [0 1] [2 3] [4 5] [6 .] [. .]        the next token, 7, sees 5 and 6
              behind       first_block      num_blocks(7, 12) = 5

KVSpan is the one rule of it: for the table of a running sequence, for a prefix that is found, and for what a worker has
room for. It knows no block and no token by its id. A block's walk asks it how many blocks are wanted and which are
given up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class KVSpan:
    block_size: int
    window: int = 0  # of so many tokens, itself among them, each token sees the KV; 0: of all before it
    max_new_tokens: int = 1  # of a sequence in one step; a table with a window is as long as the next step may need

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1")

    def first_block(self, num_computed_tokens: int) -> int:
        """The first block that the next token, or one behind it, sees."""
        return max(0, num_computed_tokens - self.window + 1) // self.block_size if self.window else 0

    def num_blocks(self, num_computed_tokens: int, num_tokens: int) -> int:
        """The length of the block table with which the next step can be computed, blocks behind the window included."""
        if self.window:
            num_tokens = min(num_tokens, num_computed_tokens + self.max_new_tokens)
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence holds at one time while it grows to `num_tokens`.

        Blocks are given back when a block is full: so the window's, from any offset, the step's, and the one between.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if not self.window:
            return num_blocks
        seen, new = (-(-(count - 1) // self.block_size) for count in (self.window, self.max_new_tokens))
        return min(num_blocks, seen + new + 1)

    def longest_hit(
        self, keys: Sequence[Key], find: Callable[[Key], int | None], start: int = 0
    ) -> tuple[int, list[int]]:
        """The longest prefix of the full blocks `keys` that can be had: its first block to have, and their ids.

        `find` gives the id of a block that is here. Without a window all of a prefix must be; with one, what the token
        behind it sees, and prefixes up to `start` are not looked for. No block is asked for twice.
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
