"""The blocks of one KV cache: who is free, who is used, by how many block tables, and which content can be found again.

    block 0                     never handed out: padding rows of a batch write there
    free     ref_count == 0     in the free list; nothing is known of its content
    active   ref_count >= 1     in ref_count block tables; more than one: shared, and not written to
    cached   ref_count == 0     its content is published under a hash; evicted when the free list is empty
    held     ref_count == 0     given up while a copy of this step still reads it; free after release_held()

free + active + cached == num_usable_blocks. Every operation costs O(1) a block, however many are cached. The least
recently used cached block is evicted first; whoever gives up a block table last block first therefore loses leaves
before prefixes. The pool knows nothing of sequences, nor of what a hash stands for; it also counts the blocks of the
host pool. How long blocks were active and cached is counted where they change. A wrong call (double free, more than is
there) is an error of ours and fails an assertion.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_worker.scheduling.kv_durations import KVDurations

PADDING_BLOCK_ID = 0


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None  # of its published content
    since_seconds: float = 0.0  # of its being active, or cached


def _ignore(block_id: int, block_hash: bytes) -> None:
    pass


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes], None] = _ignore,
        durations: KVDurations | None = None,
    ) -> None:
        """`on_evict` gets block id and hash of each block that loses its content, before the block is handed out."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs the padding block and at least one more")
        self._blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        # A stack: the block freed last is the one whose lines are still in the caches. Lowest ids go out first.
        self._free_block_ids = list(range(num_blocks - 1, PADDING_BLOCK_ID, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # block ids, least recently used first
        self._by_hash: dict[bytes, int] = {}  # published blocks, active or cached
        # The block with this content, if there is one. Asked for each block of a prompt: without a call between.
        self.find: Callable[[bytes], int | None] = self._by_hash.get
        self._num_references = 0
        self._held: set[int] = set()
        self._on_evict = on_evict
        self._durations = durations or KVDurations()

    @property
    def num_usable_blocks(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_block_ids)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """How many allocate() can hand out: free ones, and cached ones by evicting them."""
        return len(self._free_block_ids) + len(self._cached)

    @property
    def num_active_blocks(self) -> int:
        return self.num_usable_blocks - self.num_available_blocks

    @property
    def num_references(self) -> int:
        """Entries in all block tables together: what num_active_blocks would be without sharing."""
        return self._num_references

    def allocate(self, num_blocks: int) -> list[int]:
        """Ids of `num_blocks` blocks, each with one reference; cached ones are evicted if there are not enough."""
        available = self.num_available_blocks
        assert 0 <= num_blocks <= available, f"{num_blocks} of {available} free and cached blocks"
        block_ids = []
        now = self._durations.clock()
        for _ in range(num_blocks):
            block_id = self._free_block_ids.pop() if self._free_block_ids else self._evict(now)
            block = self._blocks[block_id]
            block.ref_count, block.since_seconds = 1, now
            block_ids.append(block_id)
        self._num_references += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One reference more for each of these active or cached blocks: another block table holds them now."""
        now, blocks = self._durations.clock(), self._blocks
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
        return self._blocks[block_id].ref_count

    def is_shared(self, block_id: int) -> bool:
        return self._blocks[block_id].ref_count > 1

    def is_cached(self, block_id: int) -> bool:
        """Whether sharing it makes one block less available."""
        return block_id in self._cached

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Let find() give this active block; False if the content is published already, under this id or another."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is not active"
        if block.block_hash is not None or block_hash in self._by_hash:
            return False
        block.block_hash = block_hash
        self._by_hash[block_hash] = block_id
        return True

    def published(self, block_ids: Iterable[int]) -> list[int]:
        """The blocks of these whose content find() gives."""
        blocks = self._blocks
        return [block_id for block_id in block_ids if blocks[block_id].block_hash is not None]

    def retract(self, block_hash: bytes) -> int | None:
        """Let find() no longer give the block with this content; return its id, or None if there is none."""
        block_id = self._by_hash.pop(block_hash, None)
        if block_id is None:
            return None
        block = self._blocks[block_id]
        block.block_hash = None
        if block_id in self._cached:
            now = self._durations.clock()
            del self._cached[block_id]
            self._durations.cached.add(now - block.since_seconds)
            block.since_seconds = now
            self._free_block_ids.append(block_id)
        return block_id

    def free(self, block_ids: Iterable[int]) -> None:
        """One reference less for each; a block without references is cached if it is published, and free if not."""
        now, blocks = self._durations.clock(), self._blocks
        for block_id in block_ids:
            block = blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            self._num_references -= 1
            if block.ref_count == 0 and block_id not in self._held:
                self._give_up(block, now)

    def hold(self, block_id: int) -> None:
        """Nobody gets this active block before release_held(), even if its last reference goes: a copy reads it."""
        assert self._blocks[block_id].ref_count > 0, f"block {block_id} is not active"
        self._held.add(block_id)

    def release_held(self) -> None:
        """The step is planned: what it overwrites, it overwrites after its copies have read."""
        now = self._durations.clock()
        for block_id in self._held:
            if self._blocks[block_id].ref_count == 0:
                self._give_up(self._blocks[block_id], now)
        self._held.clear()

    def states(self) -> str:
        """One letter a block, by id: p(adding), f(ree), c(ached), a(ctive), s(hared)."""
        letters = ["f" if block.ref_count == 0 else "a" if block.ref_count == 1 else "s" for block in self._blocks]
        letters[PADDING_BLOCK_ID] = "p"
        for block_id in self._cached:
            letters[block_id] = "c"
        return "".join(letters)

    def shared_blocks(self) -> list[tuple[int, int]]:
        """Block id and references of each block that has more than one."""
        return [(block.block_id, block.ref_count) for block in self._blocks if block.ref_count > 1]

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless `block_tables`, all there are, explain every reference and each block's state."""
        assert not self._held, f"{self._held} are still held"
        references = Counter(block_id for block_table in block_tables for block_id in block_table)
        assert references[PADDING_BLOCK_ID] == 0, "the padding block is in a block table"
        assert self._num_references == references.total(), f"{self._num_references} != {references.total()} references"
        counts = {block.block_id: block.ref_count for block in self._blocks if block.ref_count}
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
        published = {block.block_hash: block.block_id for block in self._blocks if block.block_hash is not None}
        assert published == self._by_hash, "blocks and hashes disagree"
        assert not free & set(published.values()), "a free block is published"

    def _give_up(self, block: KVBlock, now: float) -> None:
        self._durations.active.add(now - block.since_seconds)
        block.since_seconds = now
        if block.block_hash is None:
            self._free_block_ids.append(block.block_id)
        else:
            self._cached[block.block_id] = None

    def _evict(self, now: float) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block = self._blocks[block_id]
        self._durations.cached.add(now - block.since_seconds)
        assert block.block_hash is not None
        block_hash, block.block_hash = block.block_hash, None
        del self._by_hash[block_hash]
        self._on_evict(block_id, block_hash)
        return block_id
