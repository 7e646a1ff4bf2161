"""KV blocks in host memory: those of swapped sequences, and full blocks that the device's prefix cache evicted.

    swapped     referenced by the host block table of a waiting sequence
    cached      prefixes; the least recently used is evicted when a swap or a newer prefix needs the block

Blocks are matched by key: content that is already on the host is not copied again, and content that is on the device
is not fetched. So sequences with a common prefix are swapped out with one copy of it. All transfers of a schedule are
in one batch: out first, then in. Sources are held until the batch is complete, as in BlockPool. The KVCacheManager
decides whether a transfer is worth its time.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID, BlockKey, Table
from engine_worker.kv.transfers import BlockCopy, Transfers


class HostTier:
    def __init__(self, num_blocks: int, device_pool: BlockPool, block_size: int) -> None:
        """Create the tier. `num_blocks` includes block 0, which is never used, as on the device."""
        self.num_evicted_blocks = 0
        self._device_pool = device_pool
        self._pool = BlockPool(num_blocks, self._count_eviction)
        self._block_size = block_size
        self._planned = Transfers()
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
        self._pool.free([self._store(block_id, key)])
        return True

    def num_blocks_to_store(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks with computed tokens are not on the host; a shared block counts once."""
        return len({block_id for block_id, host_block_id in self._contents(sequences) if host_block_id is None})

    def has_room(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether there are enough host blocks for swap_out()."""
        contents = set(self._contents(sequences))
        num_needed = sum(host_block_id is None or self._pool.is_cached(host_block_id) for _, host_block_id in contents)
        return num_needed <= self._pool.num_available_blocks

    def swap_out(self, sequences: Iterable[Sequence]) -> int:
        """Give each sequence host block tables, and return how many blocks are copied. Call has_room() first.

        A block that several of them share is copied once. The caller frees the device blocks.
        """
        num_before = len(self._planned.swap_out)
        stored: dict[int, int] = {}  # device block id -> host block id
        for sequence in sequences:
            assert not sequence.kv.is_on_host, f"{sequence.request_id} is swapped out already"
            for table, keys in self._keys(sequence):
                table.host_blocks = [NULL_BLOCK_ID] * table.num_released
                # The table may be longer, because it already has the block of the next token.
                for block_id, key in zip(table.held, keys, strict=False):
                    host_block_id = stored.get(block_id) or (self._pool.find(key) if key else None)
                    if host_block_id is None:
                        stored[block_id] = host_block_id = self._store(block_id, key)
                    else:
                        self._pool.share([host_block_id])
                    table.host_blocks.append(host_block_id)
        return len(self._planned.swap_out) - num_before

    def on_device(self, sequence: Sequence) -> list[int | None]:
        """Return, for each of kv.host_blocks, the device block with the same content, or None."""
        find = self._device_pool.find
        return [None if key is None else find(key) for _, keys in self._keys(sequence) for key in keys]

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
        """Return the host block with this content, of a swapped sequence or a prefix."""
        return self._pool.find(key)

    def retract(self, key: BlockKey) -> None:
        """Make content unfindable."""
        self._pool.retract(key)

    def share(self, host_block_ids: Iterable[int]) -> None:
        """Add a reference to each host block."""
        self._pool.share(host_block_ids)

    def free(self, host_block_ids: SequenceOf[int]) -> None:
        """Free host blocks; hashed ones stay cached. The last is freed first: leaves are evicted before prefixes."""
        self._pool.free(reversed(host_block_ids))

    def take_transfers(self) -> Transfers:
        """Return the transfers planned since the last call, and release their sources."""
        transfers, self._planned = self._planned, Transfers()
        self._pool.release_held()
        self._arriving.clear()
        return transfers

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the pool agrees with the host block tables."""
        self._pool.check_integrity(sequence.kv.host_blocks for sequence in sequences)

    def _keys(self, sequence: Sequence) -> Iterator[tuple[Table, list[BlockKey | None]]]:
        """Yield each table with the key of each held block that has computed tokens.

        A key is None if the block is partly filled or was not published.
        """
        kv = sequence.kv
        num_full = min(kv.num_computed_tokens, sequence.num_known_tokens) // self._block_size
        num_blocks = -(-kv.num_computed_tokens // self._block_size)
        known = kv.digests[:num_full]
        unknown: list[BlockKey | None] = [None] * (num_blocks - len(known))
        for group, table in enumerate(kv.tables):
            yield table, [*((group, digest) for digest in known), *unknown][table.num_released :]

    def _contents(self, sequences: Iterable[Sequence]) -> Iterator[tuple[int, int | None]]:
        """Yield each device block with computed tokens, and the host block with the same content, or None."""
        for sequence in sequences:
            for table, keys in self._keys(sequence):
                for block_id, key in zip(table.held, keys, strict=False):
                    yield block_id, None if key is None else self._pool.find(key)

    def _store(self, block_id: int, key: BlockKey | None) -> int:
        assert block_id not in self._arriving, f"block {block_id} has not arrived"
        (host_block_id,) = self._pool.allocate(1)
        if key is not None:
            self._pool.publish(host_block_id, key)
        self._planned.swap_out.append(BlockCopy(block_id, host_block_id))
        return host_block_id

    def _count_eviction(self, host_block_id: int, key: BlockKey) -> None:
        self.num_evicted_blocks += 1
