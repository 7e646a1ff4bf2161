"""The KV of one sequence: its blocks in each group of layers, and the hashes under which they can be shared."""

from dataclasses import dataclass, field
from typing import TypeAlias

NULL_BLOCK_ID = 0  # never owned by a sequence; marks table entries that are not read

BlockKey: TypeAlias = tuple[int, bytes]  # (group, digest of all tokens up to the block's end): names a block's content


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence in one group; entry i holds tokens [i, i + 1) * block_size."""

    blocks: list[int] = field(default_factory=list)  # on the device
    host_blocks: list[int] = field(default_factory=list)  # in host memory, while swapped out
    num_released: int = 0  # leading NULL_BLOCK_ID entries of either list, outside the window

    @property
    def held(self) -> list[int]:
        """Block ids held on the device."""
        return self.blocks[self.num_released :]

    @property
    def host_held(self) -> list[int]:
        """Block ids held on the host."""
        return self.host_blocks[self.num_released :]


def _one_table() -> tuple[Table, ...]:
    return (Table(),)


@dataclass(slots=True, eq=False)
class SequenceKV:
    """KV state of one sequence. An admission or a fork replaces `tables` by one per group of the model."""

    tables: tuple[Table, ...] = field(default_factory=_one_table)
    num_changes: int = 0  # of blocks in the current tables, so that copies of the tables know when to follow
    num_computed_tokens: int = 0  # including steps in flight
    # Prefix cache state. A digest covers all tokens up to its block's end and the root, which limits who may share it.
    cache_root: bytes = b""
    digests: list[bytes] = field(default_factory=list)  # of the leading full blocks, each computed once
    # Recurrent state: a block of the state pool, and the positions at which it is kept for others, ascending.
    state_block: int = 0  # 0: none, or the model has no recurrent layers
    host_state_block: int = 0  # in host memory, while swapped out
    checkpoints: tuple[int, ...] = ()
    num_pending_tokens: int = 0  # the last computed ones, which the state does not contain yet; see StateTables
    num_published_blocks: int = 0  # leading blocks that are registered in the cache, in every group

    @property
    def blocks(self) -> list[int]:
        """Block ids held on the device, in all groups."""
        return [block_id for table in self.tables for block_id in table.held]

    @property
    def host_blocks(self) -> list[int]:
        """Block ids held on the host, in all groups."""
        return [block_id for table in self.tables for block_id in table.host_held]

    @property
    def is_on_device(self) -> bool:
        """Whether it has blocks on the device."""
        return any(table.blocks for table in self.tables)

    @property
    def is_on_host(self) -> bool:
        """Whether it has blocks in host memory."""
        return any(table.host_blocks for table in self.tables)
