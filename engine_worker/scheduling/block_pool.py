"""The blocks of one KV cache: who is free, who is used, and by how many block tables.

    block 0                     never handed out: padding rows of a batch write there
    free     ref_count == 0     in the free list
    active   ref_count >= 1     in ref_count block tables; more than one: shared, and not written to
    cached   ref_count == 0     kept for its content until the free list is empty (none before prefix caching)
    held     ref_count == 0     freed while a copy of this step still reads it; free after release_held()

free + active + cached == num_usable_blocks. Every operation costs O(1) a block. The pool knows nothing of sequences,
nor of what is in a block. A wrong call (double free, more than is free) is an error of ours and fails an assertion.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PADDING_BLOCK_ID = 0


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_count: int = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs the padding block and at least one more")
        self._blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        # A stack: the block freed last is the one whose lines are still in the caches. Lowest ids go out first.
        self._free_block_ids = list(range(num_blocks - 1, PADDING_BLOCK_ID, -1))
        self._num_references = 0
        self._held: set[int] = set()

    @property
    def num_usable_blocks(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_block_ids)

    @property
    def num_cached_blocks(self) -> int:
        return 0

    @property
    def num_active_blocks(self) -> int:
        return self.num_usable_blocks - self.num_free_blocks - self.num_cached_blocks

    @property
    def num_references(self) -> int:
        """Entries in all block tables together: what num_active_blocks would be without sharing."""
        return self._num_references

    def allocate(self, num_blocks: int) -> list[int]:
        """Ids of `num_blocks` blocks, each with one reference."""
        assert 0 <= num_blocks <= self.num_free_blocks, f"{num_blocks} of {self.num_free_blocks} free blocks"
        block_ids = [self._free_block_ids.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._blocks[block_id].ref_count = 1
        self._num_references += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One reference more for each of these active blocks: another block table holds them now."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is not active"
            block.ref_count += 1
            self._num_references += 1

    def is_shared(self, block_id: int) -> bool:
        return self._blocks[block_id].ref_count > 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One reference less for each; a block without references is free at once."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            self._num_references -= 1
            if block.ref_count == 0 and block_id not in self._held:
                self._free_block_ids.append(block_id)

    def hold(self, block_id: int) -> None:
        """Nobody gets this active block before release_held(), even if its last reference goes: a copy reads it."""
        assert self._blocks[block_id].ref_count > 0, f"block {block_id} is not active"
        self._held.add(block_id)

    def release_held(self) -> None:
        """The step is planned: what it overwrites, it overwrites after its copies have read."""
        self._free_block_ids += [block_id for block_id in self._held if self._blocks[block_id].ref_count == 0]
        self._held.clear()

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless `block_tables`, all there are, explain every reference and each block's state."""
        assert not self._held, f"{self._held} are still held"
        references = Counter(block_id for block_table in block_tables for block_id in block_table)
        assert references[PADDING_BLOCK_ID] == 0, "the padding block is in a block table"
        assert self._num_references == references.total(), f"{self._num_references} != {references.total()} references"
        for block in self._blocks:
            expected = references[block.block_id]
            assert block.ref_count == expected, f"{block} has {expected} references in the block tables"
        free = set(self._free_block_ids)
        assert len(free) == self.num_free_blocks, "a block is in the free list twice"
        assert PADDING_BLOCK_ID not in free, "the padding block is in the free list"
        assert not free & references.keys(), f"free and in use: {free & references.keys()}"
        counted = len(free) + len(+references) + self.num_cached_blocks
        assert counted == self.num_usable_blocks, f"free + active + cached is {counted}, not {self.num_usable_blocks}"
