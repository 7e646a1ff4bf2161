"""The block tables of sequences: which blocks hold their KV, and whether more of it fits.

A sequence gets the blocks for all its tokens when it is admitted, and one more each time its output crosses a block's
edge; so a half-computed prompt never waits for memory. A forked sequence shares all blocks of its parent, the partly
filled last one too; a shared block is copied before somebody writes to it (copy-on-write, section 4.4 of the paper).
With the prefix cache a sequence starts with what others have computed of its prefix. The manager decides nothing: the
scheduler says who is admitted and who yields.
"""

from collections.abc import Collection, Iterable

from engine_worker.scheduling.batch import BlockCopy
from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.prefix_cache import PrefixCache, PrefixMatch
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.stats import KVCacheStats


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        """`num_blocks` is the executor's count and includes block 0, which no sequence ever gets."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, self._on_evict)
        self._prefix_cache = PrefixCache(self._pool, block_size) if enable_prefix_caching else None
        self._block_copies: list[BlockCopy] = []
        self._step = 0  # of the batch that is being planned

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be given out: free ones, and those of the prefix cache that no sequence uses."""
        return self._pool.num_available_blocks

    @property
    def capacity_tokens(self) -> int:
        """The most tokens whose KV exists at one time: the longest a sequence can get when it is alone."""
        return self._pool.num_usable_blocks * self.block_size

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that `sequence` needs to compute all its tokens: beyond its table, and to replace shared ones."""
        return -(-sequence.num_tokens // self.block_size) - len(sequence.block_table) + len(self._to_replace(sequence))

    def can_allocate(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Whether all missing blocks are available, and `headroom_blocks` would be left."""
        return self.num_missing_blocks(sequence) + headroom_blocks <= self._pool.num_available_blocks

    def allocate(self, sequence: Sequence) -> None:
        """Complete the block table and make its end writable; the caller has asked can_allocate."""
        self.prepare_write(sequence)
        sequence.block_table += self._pool.allocate(self.num_missing_blocks(sequence))

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Give a sequence without blocks all it needs, the cached prefix first, if `headroom_blocks` would be left.

        Its num_computed_tokens says then how much it need not compute.
        """
        match = self._prefix_cache.match(sequence, self._step) if self._prefix_cache else PrefixMatch([])
        num_new = self.num_missing_blocks(sequence) - len(match.block_ids)
        spare = self._pool.num_available_blocks - num_new - headroom_blocks
        spare -= sum(map(self._pool.is_cached, match.block_ids))
        if spare < 0:
            return False
        self._pool.share(match.block_ids)
        sequence.num_computed_tokens = len(match.block_ids) * self.block_size
        source = match.copied_block_id
        if source is not None and self._pool.is_cached(source) and spare == 0:
            source = None  # keeping it for the copy would take one block too many
        if source is not None:
            self._pool.share([source])
            self._pool.hold(source)
        sequence.block_table = match.block_ids + self._pool.allocate(num_new)
        if source is not None:
            self._pool.free([source])
            self._block_copies.append(BlockCopy(source, sequence.block_table[len(match.block_ids)]))
            sequence.num_computed_tokens += match.num_copied_tokens
        sequence.num_published_blocks = len(match.block_ids)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The step that is being planned computes `sequence` to `num_computed_tokens`: others can share its blocks."""
        if self._prefix_cache:
            self._prefix_cache.publish(sequence, num_computed_tokens, self._step)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child`, whose tokens begin with the computed ones of `parent`, shares all its blocks. O(1) a block."""
        assert not child.block_table, f"{child.request_id} has blocks"
        assert child.num_tokens >= parent.num_computed_tokens, f"{child.request_id} lacks computed tokens"
        used = -(-parent.num_computed_tokens // self.block_size)
        child.block_table = parent.block_table[:used]
        child.num_computed_tokens = parent.num_computed_tokens
        child.cache_root = parent.cache_root
        child.block_hashes = parent.block_hashes[: parent.num_computed_tokens // self.block_size]
        child.num_published_blocks = min(parent.num_published_blocks, len(child.block_hashes))
        self._pool.share(child.block_table)

    def prepare_write(self, sequence: Sequence) -> None:
        """Replace the shared blocks that the next step of `sequence` writes to; what is computed in them is copied."""
        for index in self._to_replace(sequence):
            source = sequence.block_table[index]
            (target,) = self._pool.allocate(1)
            if index * self.block_size < sequence.num_computed_tokens:
                self._pool.hold(source)
                self._block_copies.append(BlockCopy(source, target))
            self._pool.free([source])
            sequence.block_table[index] = target

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies planned since the last call, for one batch: to be done before it writes anything, in any order.

        Until this call their sources are held: blocks that were freed meanwhile can be given out again after it.
        """
        copies, self._block_copies = self._block_copies, []
        self._step += 1
        self._pool.release_held()
        return copies

    def free(self, sequence: Sequence) -> None:
        """Give up the whole block table; what is computed stays in the cache until its blocks are needed.

        Last block first: without a cache a table that is handed out again has its blocks in order, and with it leaves
        are evicted before their prefixes.
        """
        if self._prefix_cache and sequence.block_table:
            self._prefix_cache.publish_end(sequence, self._step - 1)
        self._pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_published_blocks = 0

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """`running`: every sequence that has blocks."""
        active, references = self._pool.num_active_blocks, self._pool.num_references
        return KVCacheStats(
            block_size=self.block_size,
            num_blocks=self._pool.num_usable_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_active_blocks=active,
            num_wasted_slots=self._num_wasted_slots(running),
            sharing_ratio=1 - active / references if references else 0.0,
        )

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pool agrees with the tables of `sequences`, which are all there are."""
        self._pool.check_integrity(sequence.block_table for sequence in sequences)
        for sequence in sequences:
            num_slots = len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens <= num_slots, f"{sequence.request_id} computed outside its blocks"

    def _on_evict(self, block_id: int, block_hash: bytes) -> None:
        if self._prefix_cache:
            self._prefix_cache.forget(block_id)

    def _num_wasted_slots(self, running: Iterable[Sequence]) -> int:
        """Slots of active blocks without a computed token; a shared block counts once, as its fullest owner has it."""
        filled: dict[int, int] = {}
        for sequence in running:
            for index in range(sequence.num_computed_tokens // self.block_size, len(sequence.block_table)):
                block_id = sequence.block_table[index]
                num_filled = max(0, sequence.num_computed_tokens - index * self.block_size)
                filled[block_id] = max(num_filled, filled.get(block_id, 0))
        return len(filled) * self.block_size - sum(filled.values())

    def _to_replace(self, sequence: Sequence) -> list[int]:
        """Indices of shared blocks in the part of the table that is not computed yet."""
        table = sequence.block_table
        first = sequence.num_computed_tokens // self.block_size
        return [index for index in range(first, len(table)) if self._pool.is_shared(table[index])]
