"""The block tables of sequences: allocation, sharing, copy-on-write, and release outside of attention windows.

A sequence gets the blocks for all its tokens when it is admitted, then one whenever its output fills a block; so a
half-computed prompt never waits for memory. If all layers have a window, it gets only the blocks of its next step, and
frees those that no later token sees (KVSpan) before the following step is planned.

A fork shares all blocks of its parent, including a partly filled last one. A shared block is copied before a write.

Source of copy-on-write: PagedAttention, section 4.4, https://arxiv.org/abs/2309.06180.
"""

from collections import Counter
from collections.abc import Iterable

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID
from engine_worker.kv.span import KVSpan
from engine_worker.kv.transfers import BlockCopy


class BlockTables:
    """The block tables of all sequences.

    `copies` are those of shared blocks, which the next batch makes before its forward pass; their sources are held.
    """

    def __init__(self, pool: BlockPool, span: KVSpan) -> None:
        self.copies: list[BlockCopy] = []
        self._pool = pool
        self._is_shared = pool.is_shared
        self._span = span
        self._block_size = span.block_size
        self._advanced: list[Sequence] = []  # with a window, since release_outside_window()

    def missing(self, sequence: Sequence) -> int:
        """Return the blocks that `sequence` needs to compute all its tokens: new ones, and copies of shared ones."""
        return self._num_lacking(sequence) + len(self._to_replace(sequence))

    def needs_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether a sequence with `num_tokens` tokens is missing blocks. A decode checks only its last block."""
        kv = sequence.kv
        table = kv.block_table
        if num_tokens > len(table) * self._block_size:
            return True
        first = kv.num_computed_tokens // self._block_size
        if first == len(table) - 1:  # the usual case
            return self._is_shared(table[first])
        return any(map(self._is_shared, table[first:]))

    def can_allocate(self, *sequences: Sequence) -> bool:
        """Return whether all blocks that these sequences are missing are available together.

        Of sequences that share a block, the last writer keeps it if no other sequence holds it.
        """
        num_available = self._pool.num_available_blocks
        if len(sequences) == 1:
            return self.missing(sequences[0]) <= num_available
        num_missing = sum(map(self.missing, sequences))
        if num_missing <= num_available:
            return True
        writers = Counter(s.kv.block_table[index] for s in sequences for index in self._to_replace(s))
        num_kept = sum(number == self._pool.ref_count(block_id) for block_id, number in writers.items())
        return num_missing - num_kept <= num_available

    def allocate(self, sequence: Sequence) -> None:
        """Complete the block table and make its end writable. Call can_allocate() first."""
        self._replace_shared(sequence)
        sequence.kv.block_table += self._pool.allocate(self._num_lacking(sequence))

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Return whether the parent still holds all blocks that the token after `num_tokens` sees."""
        return parent.kv.num_released_blocks <= self._span.first_block(num_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start `child` with the first `num_tokens` computed tokens of `parent`; they share the blocks.

        O(1) per block. The last block may be partly filled, and may contain later tokens of the parent.
        """
        assert not child.kv.block_table, f"{child.request_id} has blocks"
        assert num_tokens <= parent.kv.num_computed_tokens, f"{parent.request_id} has not computed {num_tokens} tokens"
        assert child.num_tokens >= num_tokens, f"{child.request_id} lacks computed tokens"
        released = parent.kv.num_released_blocks
        assert released <= self._span.first_block(num_tokens), f"{parent.request_id} has released blocks of its fork"
        used = -(-num_tokens // self._block_size)
        child.kv.block_table = parent.kv.block_table[:used]
        child.kv.num_released_blocks = released
        child.kv.num_computed_tokens = num_tokens
        child.kv.cache_root = parent.kv.cache_root
        child.kv.block_hashes = parent.kv.block_hashes[: num_tokens // self._block_size]
        child.kv.num_published_blocks = min(parent.kv.num_published_blocks, len(child.kv.block_hashes))
        self._pool.share(child.kv.blocks)
        self.advanced(child)

    def advanced(self, sequence: Sequence) -> None:
        """Record that the step being planned completes a block of `sequence`."""
        if self._span.window:
            self._advanced.append(sequence)

    def release_outside_window(self) -> None:
        """Free the blocks of advanced sequences that no later token sees. Call it before planning a step.

        The previous step may still read these blocks; new owners write to them in a later step.
        """
        for sequence in self._advanced:
            kv = sequence.kv
            first = kv.num_released_blocks
            end = min(self._span.first_block(kv.num_computed_tokens), len(kv.block_table))
            if end > first:
                released = kv.block_table[first:end]
                kv.block_table[first:end] = [NULL_BLOCK_ID] * len(released)
                kv.num_released_blocks = end
                self._pool.free(released)
        self._advanced.clear()

    def begin_with_copy(self, sequence: Sequence, index: int, source: int) -> None:
        """Copy `source` to block `index` of `sequence`, and drop the reference to `source` that the caller holds."""
        self._pool.free([source])
        self.copies.append(BlockCopy(source, sequence.kv.block_table[index]))

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies planned since the last call."""
        copies, self.copies = self.copies, []
        return copies

    def num_wasted_slots(self, running: Iterable[Sequence]) -> int:
        """Return the slots of active blocks without a computed token; a shared block counts once, at its fullest."""
        filled: dict[int, int] = {}
        for sequence in running:
            for index in range(sequence.kv.num_computed_tokens // self._block_size, len(sequence.kv.block_table)):
                block_id = sequence.kv.block_table[index]
                num_filled = max(0, sequence.kv.num_computed_tokens - index * self._block_size)
                filled[block_id] = max(num_filled, filled.get(block_id, 0))
        return len(filled) * self._block_size - sum(filled.values())

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise AssertionError if the block table is longer than needed."""
        assert self._num_lacking(sequence) >= 0, f"{sequence.request_id} has more blocks than its tokens need"

    def _replace_shared(self, sequence: Sequence) -> None:
        """Replace the shared blocks that the next step of `sequence` writes to, and copy their computed tokens."""
        for index in self._to_replace(sequence):
            source = sequence.kv.block_table[index]
            (target,) = self._pool.allocate(1)
            if index * self._block_size < sequence.kv.num_computed_tokens:
                self._pool.hold(source)
                self.copies.append(BlockCopy(source, target))
            self._pool.free([source])
            sequence.kv.block_table[index] = target

    def _to_replace(self, sequence: Sequence) -> list[int]:
        """Return the indices of shared blocks in the part of the table that is not computed yet."""
        table = sequence.kv.block_table
        first = sequence.kv.num_computed_tokens // self._block_size
        is_shared = self._is_shared
        return [index for index in range(first, len(table)) if is_shared(table[index])]

    def _num_lacking(self, sequence: Sequence) -> int:
        """Return the number of blocks that the table is too short."""
        kv = sequence.kv
        return self._span.num_blocks(kv.num_computed_tokens, sequence.num_tokens) - len(kv.block_table)
