"""The KV of one sequence: its blocks, the number of computed tokens, and the hashes under which it can be shared.

There is one block table, because all layers form one group.
"""

from dataclasses import dataclass, field

NULL_BLOCK_ID = 0  # never owned by a sequence; marks table entries that are not read


@dataclass(slots=True, eq=False)
class SequenceKV:
    """KV state of one sequence."""

    block_table: list[int] = field(default_factory=list)  # entry i holds tokens [i, i + 1) * block_size
    host_block_table: list[int] = field(default_factory=list)  # blocks in host memory while swapped out
    num_released_blocks: int = 0  # leading NULL_BLOCK_ID entries of either table, outside every window
    num_computed_tokens: int = 0  # including steps in flight
    # Prefix cache state. A block's hash covers all tokens up to its end and the root, which limits who may share it.
    cache_root: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, each computed once
    num_published_blocks: int = 0  # leading blocks that are registered in the cache

    @property
    def blocks(self) -> list[int]:
        """Block ids held on the device."""
        return self.block_table[self.num_released_blocks :]

    @property
    def host_blocks(self) -> list[int]:
        """Block ids held on the host."""
        return self.host_block_table[self.num_released_blocks :]
