"""The block tables of sequences: how many blocks one misses, which it gets, and which it shares with others.

A sequence gets the blocks for all its tokens when it is admitted, and one more each time its output crosses a block's
edge; so a half-computed prompt never waits for memory. Where all layers have a window it gets those of its next step,
and gives back what no later token sees (KVSpan says which) before the step after that is planned.

A forked sequence shares all blocks of its parent, the partly filled last one too; a shared block is copied before
somebody writes to it (copy-on-write, section 4.4 of the paper).

It is used in every step of a block's walk: the survey asks here what each sequence misses. It knows neither prefixes
nor host memory, and not who is admitted.
"""

from collections import Counter
from collections.abc import Iterable

from engine_worker.kv.sequence_kv import NULL_BLOCK_ID
from engine_worker.kv.span import KVSpan
from engine_worker.scheduling.batch import BlockCopy
from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.sequence import Sequence


class BlockTables:
    """`copies`: of shared blocks that the next batch makes before it computes anything; their sources are held."""

    def __init__(self, pool: BlockPool, span: KVSpan) -> None:
        self.copies: list[BlockCopy] = []
        self._pool = pool
        self._is_shared = pool.is_shared
        self._span = span
        self._block_size = span.block_size
        self._advanced: list[Sequence] = []  # with a window, since release_outside_window()

    def missing(self, sequence: Sequence) -> int:
        """Blocks that `sequence` needs to compute all its tokens: beyond its table, and to replace shared ones."""
        return self._num_lacking(sequence) + len(self._to_replace(sequence))

    def needs_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has missing blocks. Of one that decodes, it looks at its last block."""
        kv = sequence.kv
        table = kv.block_table
        if num_tokens > len(table) * self._block_size:
            return True
        first = kv.num_computed_tokens // self._block_size
        if first == len(table) - 1:  # of most sequences in most steps
            return self._is_shared(table[first])
        return any(map(self._is_shared, table[first:]))

    def can_allocate(self, *sequences: Sequence) -> bool:
        """Whether all blocks that these miss together are available.

        Of those that share a block, the last to replace it keeps it if no other sequence holds it.
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
        """Complete the block table and make its end writable; the caller has asked can_allocate."""
        self._replace_shared(sequence)
        sequence.kv.block_table += self._pool.allocate(self._num_lacking(sequence))

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether no window has taken a block that the token after `num_tokens` sees."""
        return parent.kv.num_released_blocks <= self._span.first_block(num_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child` begins with `num_tokens` of the computed tokens of `parent`, and shares their blocks.

        O(1) a block. The last one may be partly filled, and may hold tokens of the parent behind those that are shared.
        """
        assert not child.kv.block_table, f"{child.request_id} has blocks"
        assert num_tokens <= parent.kv.num_computed_tokens, f"{parent.request_id} has not computed {num_tokens} tokens"
        assert child.num_tokens >= num_tokens, f"{child.request_id} lacks computed tokens"
        released = parent.kv.num_released_blocks
        assert released <= self._span.first_block(num_tokens), f"{parent.request_id} has given up what its fork sees"
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
        """The step that is being planned completes a block of `sequence`."""
        if self._span.window:
            self._advanced.append(sequence)

    def release_outside_window(self) -> None:
        """Take from the sequences that advanced what none of their next tokens sees; between the plans of two steps.

        The step before may still read these blocks: who gets them writes in a later one.
        """
        for sequence in self._advanced:
            kv = sequence.kv
            first = kv.num_released_blocks
            end = min(self._span.first_block(kv.num_computed_tokens), len(kv.block_table))
            if end > first:
                behind = kv.block_table[first:end]
                kv.block_table[first:end] = [NULL_BLOCK_ID] * len(behind)
                kv.num_released_blocks = end
                self._pool.free(behind)
        self._advanced.clear()

    def begin_with_copy(self, sequence: Sequence, index: int, source: int) -> None:
        """Block `index` of `sequence` begins with what `source` holds, which its caller shares until now."""
        self._pool.free([source])
        self.copies.append(BlockCopy(source, sequence.kv.block_table[index]))

    def take_copies(self) -> list[BlockCopy]:
        copies, self.copies = self.copies, []
        return copies

    def num_wasted_slots(self, running: Iterable[Sequence]) -> int:
        """Slots of active blocks without a computed token; a shared block counts once, as its fullest owner has it."""
        filled: dict[int, int] = {}
        for sequence in running:
            for index in range(sequence.kv.num_computed_tokens // self._block_size, len(sequence.kv.block_table)):
                block_id = sequence.kv.block_table[index]
                num_filled = max(0, sequence.kv.num_computed_tokens - index * self._block_size)
                filled[block_id] = max(num_filled, filled.get(block_id, 0))
        return len(filled) * self._block_size - sum(filled.values())

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise AssertionError if the table is longer than its tokens, and the window's next step, need."""
        assert self._num_lacking(sequence) >= 0, f"{sequence.request_id} has more blocks than its tokens need"

    def _replace_shared(self, sequence: Sequence) -> None:
        """Replace the shared blocks that the next step of `sequence` writes to; what is computed in them is copied."""
        for index in self._to_replace(sequence):
            source = sequence.kv.block_table[index]
            (target,) = self._pool.allocate(1)
            if index * self._block_size < sequence.kv.num_computed_tokens:
                self._pool.hold(source)
                self.copies.append(BlockCopy(source, target))
            self._pool.free([source])
            sequence.kv.block_table[index] = target

    def _to_replace(self, sequence: Sequence) -> list[int]:
        """Indices of shared blocks in the part of the table that is not computed yet."""
        table = sequence.kv.block_table
        first = sequence.kv.num_computed_tokens // self._block_size
        is_shared = self._is_shared
        return [index for index in range(first, len(table)) if is_shared(table[index])]

    def _num_lacking(self, sequence: Sequence) -> int:
        """Blocks that its table lacks at its end."""
        kv = sequence.kv
        return self._span.num_blocks(kv.num_computed_tokens, sequence.num_tokens) - len(kv.block_table)
