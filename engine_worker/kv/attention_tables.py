"""The block tables of sequences: allocation, sharing, copy-on-write, and release outside of attention windows.

A sequence has one table per group of layers. It gets the blocks for all its tokens when it is admitted, then one per
group whenever its output fills a block; so a half-computed prompt never waits for memory. In a group with a window, it
gets only the blocks of its next step, and frees those that no later token sees (KVSpan) before the following step is
planned.

A fork shares all blocks of its parent, including a partly filled last one. A shared block is copied before a write. All
groups of a sequence share the same entries of the part that is written, because a fork covers all groups.

Source of copy-on-write: PagedAttention, section 4.4, https://arxiv.org/abs/2309.06180.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import TypeVar

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID, Table
from engine_worker.kv.span import KVSpan, KVSpans
from engine_worker.kv.transfers import BlockCopy

Kind = TypeVar("Kind", bound=Hashable)


class AttentionTables:
    """The block tables of all sequences.

    `copies` are those of shared blocks, which the next batch makes before its forward pass; their sources are held.
    """

    def __init__(self, pool: BlockPool, spans: KVSpans) -> None:
        self.copies: list[BlockCopy] = []
        self._origins: dict[int, int] = {}  # target of a planned copy -> its source, for further copies
        self._pool = pool
        self._is_shared = pool.is_shared
        self._spans = spans.groups
        self._block_size = spans.block_size
        # Tables with a window are the shortest. Those with are equally long, whatever their windows, and those without.
        kinds = _groups_by(lambda span: span.window > 0, spans.groups)
        self._shortest = kinds.get(True, [0])[0]
        self._kinds = [(spans.groups[groups[0]], groups) for groups in kinds.values()]
        self._windows = [
            (span, groups) for span, groups in _groups_by(lambda span: span, spans.groups).items() if span.window
        ]
        self._advanced: list[Sequence] = []  # with a window, since release_outside_window()

    def missing(self, sequence: Sequence) -> int:
        """Return the blocks that `sequence` needs to compute all its tokens: new ones, and copies of shared ones."""
        return self.num_lacking(sequence) + len(self._to_replace(sequence)) * len(self._spans)

    def num_lacking(self, sequence: Sequence) -> int:
        """Return the number of blocks that the tables of `sequence` are too short."""
        return sum(number * len(groups) for number, groups in self._lacking(sequence))

    def needs_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether a sequence with `num_tokens` tokens is missing blocks.

        One table stands for all groups, and a decode checks only its last block.
        """
        kv = sequence.kv
        blocks = kv.tables[self._shortest].blocks
        if num_tokens > len(blocks) * self._block_size:
            return True
        first = kv.num_computed_tokens // self._block_size
        if first == len(blocks) - 1:  # the usual case
            return self._pool.blocks[blocks[first]].ref_count > 1  # is_shared() without a call
        return any(map(self._is_shared, blocks[first:]))

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
        written = ((sequence.kv.tables, index) for sequence in sequences for index in self._to_replace(sequence))
        writers = Counter(table.blocks[index] for tables, index in written for table in tables)
        num_kept = sum(number == self._pool.ref_count(block_id) for block_id, number in writers.items())
        return num_missing - num_kept <= num_available

    def allocate(self, sequence: Sequence) -> None:
        """Complete the block tables and make their ends writable. Call can_allocate() first."""
        kv = sequence.kv
        kv.num_changes += 1
        for index in self._to_replace(sequence):
            for table in kv.tables:
                self._replace(table, index, is_empty=index * self._block_size >= kv.num_computed_tokens)
        self.extend(sequence)

    def extend(self, sequence: Sequence) -> None:
        """Complete the block tables, and leave shared blocks as they are."""
        tables, lacking = sequence.kv.tables, self._lacking(sequence)
        new = iter(self._pool.allocate(sum(number * len(groups) for number, groups in lacking)))
        for number, groups in lacking:
            for group in groups:
                tables[group].blocks += islice(new, number)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks at the ends of the tables that were for drafts and are not needed by the next step."""
        kv, sequence.num_spare_tokens = sequence.kv, 0
        for table, span in zip(kv.tables, self._spans, strict=True):
            num_needed = span.num_blocks(kv.num_computed_tokens, sequence.num_tokens)
            if num_needed < len(table.blocks):
                kv.num_changes += 1
                self._pool.free(reversed(table.blocks[num_needed:]))
                del table.blocks[num_needed:]

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Return whether the parent still holds all blocks that the token after `num_tokens` sees."""
        return all(
            table.num_released <= span.first_block(num_tokens)
            for table, span in zip(parent.kv.tables, self._spans, strict=True)
        )

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start `child` with the first `num_tokens` computed tokens of `parent`; they share the blocks.

        O(1) per block. The last block may be partly filled. If it contains later tokens of the parent and groups have
        windows, call allocate() for the child at once: the parent may leave the block in some groups only.
        """
        assert not child.kv.is_on_device, f"{child.request_id} has blocks"
        assert num_tokens <= parent.kv.num_computed_tokens, f"{parent.request_id} has not computed {num_tokens} tokens"
        assert child.num_tokens >= num_tokens, f"{child.request_id} lacks computed tokens"
        assert self.can_fork(parent, num_tokens), f"{parent.request_id} has released blocks of its fork"
        used = -(-num_tokens // self._block_size)
        child.kv.tables = tuple(Table(table.blocks[:used], [], table.num_released) for table in parent.kv.tables)
        child.kv.num_computed_tokens = num_tokens
        child.kv.cache_root = parent.kv.cache_root
        child.kv.digests = parent.kv.digests[: num_tokens // self._block_size]
        child.kv.num_published_blocks = min(parent.kv.num_published_blocks, len(child.kv.digests))
        self._pool.share(child.kv.blocks)
        self.advanced(child)

    def advanced(self, sequence: Sequence) -> None:
        """Record that the step being planned completes a block of `sequence`."""
        if self._windows:
            self._advanced.append(sequence)

    def release_outside_window(self) -> None:
        """Free the blocks of advanced sequences that no later token sees. Call it before planning a step.

        The previous step may still read these blocks; new owners write to them in a later step.
        """
        released: list[int] = []
        for sequence in self._advanced:
            kv = sequence.kv
            for span, groups in self._windows:
                end = span.first_block(kv.num_computed_tokens)
                for group in groups:
                    table = kv.tables[group]
                    if end > table.num_released:
                        released += _release(table, end)
        self._advanced.clear()
        self._pool.free(released)

    def begin_with_copy(self, sequence: Sequence, index: int, sources: Iterable[int]) -> None:
        """Copy one source per group to block `index` of `sequence`, and drop the references that the caller holds."""
        for table, source in zip(sequence.kv.tables, sources, strict=True):
            self._pool.free([source])
            self._copy(source, table.blocks[index])

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies planned since the last call."""
        copies, self.copies, self._origins = self.copies, [], {}
        return copies

    def num_wasted_slots(self, running: Iterable[Sequence]) -> int:
        """Return the slots of active blocks without a computed token; a shared block counts once, at its fullest."""
        filled: dict[int, int] = {}
        for sequence in running:
            num_computed = sequence.kv.num_computed_tokens
            for table in sequence.kv.tables:
                for index in range(num_computed // self._block_size, len(table.blocks)):
                    block_id, num_filled = table.blocks[index], max(0, num_computed - index * self._block_size)
                    filled[block_id] = max(num_filled, filled.get(block_id, 0))
        return len(filled) * self._block_size - sum(filled.values())

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise AssertionError if a block table is longer than needed, or if groups differ where they must not."""
        kv = sequence.kv
        if not kv.is_on_device:
            return
        first, end = kv.num_computed_tokens // self._block_size, len(kv.tables[self._shortest].blocks)
        shared = [list(map(self._is_shared, table.blocks[first:end])) for table in kv.tables]
        assert all(one == shared[0] for one in shared), f"{sequence.request_id}: groups share different blocks"
        for table, span in zip(kv.tables, self._spans, strict=True):
            num_needed = span.num_blocks(kv.num_computed_tokens, sequence.num_tokens + sequence.num_spare_tokens)
            assert len(table.blocks) <= num_needed, f"{sequence.request_id} has more blocks than its tokens need"
            assert not any(map(self._is_shared, table.blocks[max(first, end) :])), "a shared block at the end"

    def _lacking(self, sequence: Sequence) -> list[tuple[int, list[int]]]:
        """Return per kind of group the blocks that each of its tables is too short, and the groups."""
        kv, num_tokens = sequence.kv, sequence.num_tokens
        return [
            (span.num_blocks(kv.num_computed_tokens, num_tokens) - len(kv.tables[groups[0]].blocks), groups)
            for span, groups in self._kinds
        ]

    def _replace(self, table: Table, index: int, *, is_empty: bool) -> None:
        """Replace a shared block that the next step writes to, and copy its computed tokens."""
        source = table.blocks[index]
        (target,) = self._pool.allocate(1)
        if not is_empty:
            origin = self._origins.get(source)  # which is held already
            if origin is None:
                self._pool.hold(source)
            self._copy(source if origin is None else origin, target)
        self._pool.free([source])
        table.blocks[index] = target

    def _copy(self, source: int, target: int) -> None:
        self.copies.append(BlockCopy(source, target))
        self._origins[target] = source

    def _to_replace(self, sequence: Sequence) -> list[int]:
        """Return the indices of shared blocks in the part of the tables that is not computed yet."""
        kv, is_shared = sequence.kv, self._is_shared
        blocks = kv.tables[self._shortest].blocks
        first = kv.num_computed_tokens // self._block_size
        return [index for index in range(first, len(blocks)) if is_shared(blocks[index])]


def _groups_by(kind: Callable[[KVSpan], Kind], spans: Iterable[KVSpan]) -> dict[Kind, list[int]]:
    """Return the groups of each kind, in order."""
    groups: dict[Kind, list[int]] = {}
    for group, span in enumerate(spans):
        groups.setdefault(kind(span), []).append(group)
    return groups


def _release(table: Table, end: int) -> list[int]:
    """Remove the blocks before `end` from a table, and return them."""
    first = table.num_released
    released = table.blocks[first:end]
    table.num_released = first + len(released)
    table.blocks[first : table.num_released] = [NULL_BLOCK_ID] * len(released)
    return released
