"""The KV of one sequence: which blocks hold it, how far it is computed, and under which hashes others find it.

All layers are one group, so there is one table; a second group would bring a second one. It knows no token and no pool.
A block's walk fills it and gives it up.
"""

from dataclasses import dataclass, field

NULL_BLOCK_ID = 0  # no sequence ever holds it; an entry of a table that nobody reads


@dataclass(slots=True, eq=False)
class SequenceKV:
    block_table: list[int] = field(default_factory=list)  # block ids; entry i holds tokens [i, i + 1) * block_size
    host_block_table: list[int] = field(default_factory=list)  # while swapped: blocks in host memory
    num_released_blocks: int = 0  # leading entries of either table that are NULL_BLOCK_ID: no window reaches them
    num_computed_tokens: int = 0  # those of steps that still run included
    # The prefix cache's notes. A block's hash covers all tokens up to its end, and the root: who may share with whom.
    cache_root: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, computed once
    num_published_blocks: int = 0  # leading blocks that the cache has been told of

    @property
    def blocks(self) -> list[int]:
        """The blocks that it holds on the device."""
        return self.block_table[self.num_released_blocks :]

    @property
    def host_blocks(self) -> list[int]:
        """The blocks that it holds on the host."""
        return self.host_block_table[self.num_released_blocks :]
