"""A pool of blocks in host memory, and the transfers between it and a pool on the device.

    referenced  by a sequence that is swapped out
    cached      content that the device evicted; the least recently used is evicted when another block is stored

All transfers of a schedule are in one batch: out first, then in. Sources are held until the batch is complete, as in
BlockPool. Used for KV blocks (host_tier.py) and for recurrent states (state_tables.py).
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.sequence_kv import BlockKey
from engine_worker.kv.transfers import BlockCopy, Moves


def _ignore(key: BlockKey) -> None:
    pass


class HostBlocks:
    def __init__(self, num_blocks: int, on_evict: Callable[[BlockKey], None] = _ignore) -> None:
        """Create the pool. `num_blocks` includes block 0, which is never used. `on_evict` gets lost content."""
        self.num_evicted_blocks = 0
        self._pool = BlockPool(num_blocks, self._evicted)
        self._on_evict = on_evict
        self._planned = Moves()
        self._arriving: set[int] = set()  # device blocks that the batch being planned fetches

    @property
    def pool(self) -> BlockPool:
        """The host blocks; read-only for callers."""
        return self._pool

    def keep(self, block_id: int, key: BlockKey) -> bool:
        """Store a full block that the device evicts. Return False if swapped sequences leave no room."""
        if self._pool.find(key) is not None:
            return True
        if self._pool.num_available_blocks == 0:
            return False
        self._pool.free([self.store(block_id, key)])
        return True

    def store(self, block_id: int, key: BlockKey | None) -> int:
        """Copy a device block, and return its host block with one reference. There must be an available block."""
        assert block_id not in self._arriving, f"block {block_id} has not arrived"
        (host_block_id,) = self._pool.allocate(1)
        if key is not None:
            self._pool.publish(host_block_id, key)
        self._planned.swap_out.append(BlockCopy(block_id, host_block_id))
        return host_block_id

    def fetch(self, host_block_ids: SequenceOf[int], block_ids: SequenceOf[int]) -> None:
        """Copy host blocks to the device blocks at the same positions. The host blocks stay referenced or held."""
        for host_block_id, block_id in zip(host_block_ids, block_ids, strict=True):
            self._pool.hold(host_block_id)
            self._planned.swap_in.append(BlockCopy(host_block_id, block_id))
            self._arriving.add(block_id)

    def is_arriving(self, block_ids: Iterable[int]) -> bool:
        """Return whether one of these device blocks is filled only for the next batch."""
        return not self._arriving.isdisjoint(block_ids)

    def find(self, key: BlockKey) -> int | None:
        """Return the host block with this content."""
        return self._pool.find(key)

    def retract(self, key: BlockKey) -> None:
        """Make content unfindable."""
        self._pool.retract(key)

    def share(self, host_block_ids: Iterable[int]) -> None:
        """Add a reference to each host block."""
        self._pool.share(host_block_ids)

    def free(self, host_block_ids: SequenceOf[int]) -> None:
        """Free host blocks; published ones stay cached. The last is freed first: leaves are evicted before prefixes."""
        self._pool.free(reversed(host_block_ids))

    def take_transfers(self) -> Moves:
        """Return the transfers planned since the last call, and release their sources."""
        planned, self._planned = self._planned, Moves()
        self._pool.release_held()
        self._arriving.clear()
        return planned

    def _evicted(self, host_block_id: int, key: BlockKey) -> None:
        self.num_evicted_blocks += 1
        self._on_evict(key)
