"""The blocks of one KV cache: their state, their reference counts, and lookup by content. Also used for host memory.

    block 0                     never allocated: padding rows of a batch write there
    free     ref_count == 0     in the free list; its content is undefined
    active   ref_count >= 1     in ref_count block tables; with more than one it is shared, and not written to
    cached   ref_count == 0     its content is published under a key; evicted when the free list is empty
    held     ref_count == 0     freed while a copy of this step still reads it; free after release_held()

free + active + cached == num_usable_blocks. Each operation costs O(1) per block. The least recently used cached block
is evicted first; free a block table's last block first, so that leaves are evicted before their prefixes. A wrong call,
such as a double free, fails an assertion.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_worker.kv.kv_durations import KVDurations
from engine_worker.kv.sequence_kv import BlockKey

PADDING_BLOCK_ID = 0


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None  # of its published content
    since_seconds: float = 0.0  # when it became active or cached


def _ignore(block_id: int, key: BlockKey) -> None:
    pass


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, BlockKey], None] = _ignore,
        durations: KVDurations | None = None,
    ) -> None:
        """Create the pool.

        Args:
            num_blocks: Includes block 0.
            on_evict: Called with id and key of each evicted block, before the block is allocated again.
            durations: Counts how long blocks are active and cached.

        Raises:
            ValueError: If num_blocks is below 2.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected at least 2, because block 0 is padding; got {num_blocks}")
        # By id; read-only for callers, which need no call per sequence and step.
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        # A stack: the block freed last is still in the CPU's caches. The lowest ids are allocated first.
        self._free_block_ids = list(range(num_blocks - 1, PADDING_BLOCK_ID, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # block ids, least recently used first
        self._by_key: dict[BlockKey, int] = {}  # published blocks, active or cached
        # Returns the block with this content. A bound dict method, because it is called for each block of a prompt.
        self.find: Callable[[BlockKey], int | None] = self._by_key.get
        self._num_references = 0
        self._held: set[int] = set()
        self._on_evict = on_evict
        self._durations = durations or KVDurations()

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_block_ids)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """The blocks that allocate() can return: free ones, and cached ones, which it evicts."""
        return len(self._free_block_ids) + len(self._cached)

    @property
    def num_active_blocks(self) -> int:
        return self.num_usable_blocks - self.num_available_blocks

    @property
    def num_references(self) -> int:
        """Entries of all block tables together, which num_active_blocks would be without sharing."""
        return self._num_references

    def allocate(self, num_blocks: int) -> list[int]:
        """Return the ids of `num_blocks` blocks, each with one reference. Evicts cached blocks if needed."""
        available = self.num_available_blocks
        assert 0 <= num_blocks <= available, f"{num_blocks} of {available} free and cached blocks"
        block_ids = []
        now = self._durations.clock()
        for _ in range(num_blocks):
            block_id = self._free_block_ids.pop() if self._free_block_ids else self._evict(now)
            block = self.blocks[block_id]
            block.ref_count, block.since_seconds = 1, now
            block_ids.append(block_id)
        self._num_references += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these active or cached blocks, for another block table."""
        now, blocks = self._durations.clock(), self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count == 0 and block_id not in self._held:
                assert block_id in self._cached, f"block {block_id} is neither active nor cached"
                del self._cached[block_id]
                self._durations.cached.add(now - block.since_seconds)
                block.since_seconds = now
            block.ref_count += 1
            self._num_references += 1

    def ref_count(self, block_id: int) -> int:
        return self.blocks[block_id].ref_count

    def is_shared(self, block_id: int) -> bool:
        return self.blocks[block_id].ref_count > 1

    def is_cached(self, block_id: int) -> bool:
        """Return whether sharing the block makes one block less available."""
        return block_id in self._cached

    def publish(self, block_id: int, key: BlockKey) -> bool:
        """Make an active block findable by its key. Return False if the block or the content is published already."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is not active"
        if block.key is not None or self._by_key.setdefault(key, block_id) != block_id:
            return False
        block.key = key
        return True

    def published(self, block_ids: Iterable[int]) -> list[int]:
        """Return those of the blocks that find() returns."""
        blocks = self.blocks
        return [block_id for block_id in block_ids if blocks[block_id].key is not None]

    def retract(self, key: BlockKey) -> int | None:
        """Make content unfindable. Return the id of its block, or None if there is none."""
        block_id = self._by_key.pop(key, None)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        block.key = None
        if block_id in self._cached:
            now = self._durations.clock()
            del self._cached[block_id]
            self._durations.cached.add(now - block.since_seconds)
            block.since_seconds = now
            self._free_block_ids.append(block_id)
        return block_id

    def free(self, block_ids: Iterable[int]) -> None:
        """Remove a reference from each. A block without references becomes cached if published, else free."""
        now, blocks, freed = self._durations.clock(), self.blocks, list(block_ids)
        for block_id in freed:
            block = blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0 and block_id not in self._held:
                self._give_up(block, now)
        self._num_references -= len(freed)

    def hold(self, block_id: int) -> None:
        """Keep an active block from being allocated before release_held(), because a copy reads it."""
        assert self.blocks[block_id].ref_count > 0, f"block {block_id} is not active"
        self._held.add(block_id)

    def release_held(self) -> None:
        """Release held blocks. Call it after planning a step, whose copies run before its writes."""
        now = self._durations.clock()
        for block_id in self._held:
            if self.blocks[block_id].ref_count == 0:
                self._give_up(self.blocks[block_id], now)
        self._held.clear()

    def states(self) -> str:
        """Return one letter per block, by id: p(adding), f(ree), c(ached), a(ctive), s(hared)."""
        letters = ["f" if block.ref_count == 0 else "a" if block.ref_count == 1 else "s" for block in self.blocks]
        letters[PADDING_BLOCK_ID] = "p"
        for block_id in self._cached:
            letters[block_id] = "c"
        return "".join(letters)

    def shared_blocks(self) -> list[tuple[int, int]]:
        """Return id and reference count of each block with more than one reference."""
        return [(block.block_id, block.ref_count) for block in self.blocks if block.ref_count > 1]

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless all `block_tables` together explain every reference and each block's state."""
        assert not self._held, f"{self._held} are still held"
        references = Counter(block_id for block_table in block_tables for block_id in block_table)
        assert references[PADDING_BLOCK_ID] == 0, "the padding block is in a block table"
        assert self._num_references == references.total(), f"{self._num_references} != {references.total()} references"
        counts = {block.block_id: block.ref_count for block in self.blocks if block.ref_count}
        wrong = counts.items() ^ references.items()
        assert not wrong, f"block ids and references in the block tables or in the pool alone: {sorted(wrong)}"
        free = set(self._free_block_ids)
        assert len(free) == self.num_free_blocks, "a block is in the free list twice"
        assert PADDING_BLOCK_ID not in free, "the padding block is in the free list"
        unused = free | self._cached.keys()
        assert len(unused) == self.num_available_blocks, f"free and cached: {free & self._cached.keys()}"
        assert not unused & references.keys(), f"free and in use: {unused & references.keys()}"
        counted = len(unused) + len(+references)
        assert counted == self.num_usable_blocks, f"free + active + cached is {counted}, not {self.num_usable_blocks}"
        published = {block.key: block.block_id for block in self.blocks if block.key is not None}
        assert published == self._by_key, "blocks and keys disagree"
        assert not free & set(published.values()), "a free block is published"

    def _give_up(self, block: KVBlock, now: float) -> None:
        self._durations.active.add(now - block.since_seconds)
        block.since_seconds = now
        if block.key is None:
            self._free_block_ids.append(block.block_id)
        else:
            self._cached[block.block_id] = None

    def _evict(self, now: float) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block = self.blocks[block_id]
        self._durations.cached.add(now - block.since_seconds)
        assert block.key is not None
        key, block.key = block.key, None
        del self._by_key[key]
        self._on_evict(block_id, key)
        return block_id
