"""The block tables of sequences: which blocks hold their KV, and whether more of it fits.

A sequence gets the blocks for all its tokens when it is admitted, and one more each time its output crosses a block's
edge; so a half-computed prompt never waits for memory. The manager decides nothing: the scheduler says who is admitted
and who yields.
"""

from collections.abc import Collection

from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.stats import KVCacheStats


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` is the executor's count and includes block 0, which no sequence ever gets."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def capacity_tokens(self) -> int:
        """The most tokens whose KV exists at one time: the longest a sequence can get when it is alone."""
        return self._pool.num_usable_blocks * self.block_size

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that `sequence` needs, beyond those it has, to compute all its tokens."""
        return -(-sequence.num_tokens // self.block_size) - len(sequence.block_table)

    def can_allocate(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Whether all missing blocks are free, and `headroom_blocks` would be left."""
        return self.num_missing_blocks(sequence) + headroom_blocks <= self._pool.num_free_blocks

    def allocate(self, sequence: Sequence) -> None:
        """Complete the block table; the caller has asked can_allocate."""
        sequence.block_table += self._pool.allocate(self.num_missing_blocks(sequence))

    def free(self, sequence: Sequence) -> None:
        """Give up the whole block table. Last block first, so that a table handed out again has its blocks in order."""
        self._pool.free(reversed(sequence.block_table))
        sequence.block_table = []

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """`running`: every sequence that has blocks."""
        active, references = self._pool.num_active_blocks, self._pool.num_references
        num_slots = sum(len(sequence.block_table) for sequence in running) * self.block_size
        return KVCacheStats(
            block_size=self.block_size,
            num_blocks=self._pool.num_usable_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_active_blocks=active,
            num_wasted_slots=num_slots - sum(sequence.num_computed_tokens for sequence in running),
            sharing_ratio=1 - active / references if references else 0.0,
        )

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pool agrees with the tables of `sequences`, which are all there are."""
        self._pool.check_integrity(sequence.block_table for sequence in sequences)
        for sequence in sequences:
            num_slots = len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens <= num_slots, f"{sequence.request_id} computed outside its blocks"
