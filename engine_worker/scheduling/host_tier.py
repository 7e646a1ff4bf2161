"""KV blocks in host memory: those of swapped sequences, and full blocks that the prefix cache lost on the device.

    swapped     referenced by the host block table of a sequence that waits
    cached      prefixes; evicted, least recently used first, when a swap or a newer prefix needs their place

A block whose content is here already is not copied again, and one that is on the device still, or again, is not
fetched (both by its hash). So sequences with a common prefix are swapped out with one copy of it. All transfers of a
schedule go into one batch: out first, then in. Sources are held until it is complete, as in the BlockPool.

Knows block ids and hashes; whether a transfer is worth its time is the KVCacheManager's question.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from engine_worker.kv.sequence_kv import NULL_BLOCK_ID
from engine_worker.scheduling.batch import BlockCopy, Transfers
from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.sequence import Sequence


class HostTier:
    def __init__(self, num_blocks: int, device_pool: BlockPool, block_size: int) -> None:
        """`num_blocks` includes block 0, which is never used, as on the device."""
        self.num_evicted_blocks = 0
        self._device_pool = device_pool
        self._pool = BlockPool(num_blocks, self._count_eviction)
        self._block_size = block_size
        self._planned = Transfers()
        self._arriving: set[int] = set()  # device blocks that the batch being planned fetches

    @property
    def pool(self) -> BlockPool:
        """To look at; only this class changes it."""
        return self._pool

    def keep(self, block_id: int, block_hash: bytes) -> bool:
        """The device evicts this full block; False if swapped sequences leave no room for it here."""
        if self._pool.find(block_hash) is not None:
            return True
        if self._pool.num_available_blocks == 0:
            return False
        self._pool.free([self._store(block_id, block_hash)])
        return True

    def num_blocks_to_store(self, sequences: Iterable[Sequence]) -> int:
        """Blocks with computed tokens whose content is not here; what several sequences share counts once."""
        return len({block_id for block_id, host_block_id in self._contents(sequences) if host_block_id is None})

    def has_room(self, sequences: Iterable[Sequence]) -> bool:
        """Whether swap_out() would find enough blocks that no swapped sequence holds."""
        contents = set(self._contents(sequences))
        num_needed = sum(host_block_id is None or self._pool.is_cached(host_block_id) for _, host_block_id in contents)
        return num_needed <= self._pool.num_available_blocks

    def swap_out(self, sequences: Iterable[Sequence]) -> int:
        """Give each its host block table; the caller has asked has_room. Returns how many blocks are copied.

        A block that several of them share is copied once. Their device blocks are the caller's to free.
        """
        num_before = len(self._planned.swap_out)
        stored: dict[int, int] = {}  # device block id -> host block id
        for sequence in sequences:
            assert not sequence.kv.host_block_table, f"{sequence.request_id} is swapped out already"
            sequence.kv.host_block_table = [NULL_BLOCK_ID] * sequence.kv.num_released_blocks
            # The table may be longer: it has the block of the next token already.
            for block_id, block_hash in zip(sequence.kv.blocks, self._hashes(sequence), strict=False):
                host_block_id = stored.get(block_id) or (self._pool.find(block_hash) if block_hash else None)
                if host_block_id is None:
                    stored[block_id] = host_block_id = self._store(block_id, block_hash)
                else:
                    self._pool.share([host_block_id])
                sequence.kv.host_block_table.append(host_block_id)
        return len(self._planned.swap_out) - num_before

    def on_device(self, sequence: Sequence) -> list[int | None]:
        """For each block of a swapped sequence: the device block with the same content, if there is one."""
        hashes = self._hashes(sequence)
        return [None if block_hash is None else self._device_pool.find(block_hash) for block_hash in hashes]

    def fetch(self, host_block_ids: SequenceOf[int], block_ids: SequenceOf[int]) -> None:
        """Copy these host blocks, which stay referenced or held, into device blocks of the same number."""
        for host_block_id, block_id in zip(host_block_ids, block_ids, strict=True):
            self._pool.hold(host_block_id)
            self._planned.swap_in.append(BlockCopy(host_block_id, block_id))
            self._arriving.add(block_id)

    def is_arriving(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these device blocks can be read only from the next batch on."""
        return not self._arriving.isdisjoint(block_ids)

    def find(self, block_hash: bytes) -> int | None:
        """The host block with this content, a swapped sequence's or a prefix's."""
        return self._pool.find(block_hash)

    def retract(self, block_hash: bytes) -> None:
        """Let find() no longer give the block with this content."""
        self._pool.retract(block_hash)

    def share(self, host_block_ids: Iterable[int]) -> None:
        self._pool.share(host_block_ids)

    def free(self, host_block_ids: SequenceOf[int]) -> None:
        """Blocks with a hash stay as prefixes. Last block first, so that leaves are evicted before their prefixes."""
        self._pool.free(reversed(host_block_ids))

    def take_transfers(self) -> Transfers:
        transfers, self._planned = self._planned, Transfers()
        self._pool.release_held()
        self._arriving.clear()
        return transfers

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self._pool.check_integrity(sequence.kv.host_blocks for sequence in sequences)

    def _hashes(self, sequence: Sequence) -> list[bytes | None]:
        """One for each block it holds with computed tokens; None if it is not full, or was never published."""
        num_full = min(sequence.kv.num_computed_tokens, sequence.num_known_tokens) // self._block_size
        num_blocks = -(-sequence.kv.num_computed_tokens // self._block_size)
        known = sequence.kv.block_hashes[:num_full]
        return [*known, *[None] * (num_blocks - len(known))][sequence.kv.num_released_blocks :]

    def _contents(self, sequences: Iterable[Sequence]) -> Iterator[tuple[int, int | None]]:
        """Each device block with computed tokens, and the host block with the same content if there is one."""
        for sequence in sequences:
            for block_id, block_hash in zip(sequence.kv.blocks, self._hashes(sequence), strict=False):
                yield block_id, None if block_hash is None else self._pool.find(block_hash)

    def _store(self, block_id: int, block_hash: bytes | None) -> int:
        assert block_id not in self._arriving, f"block {block_id} has not arrived"
        (host_block_id,) = self._pool.allocate(1)
        if block_hash is not None:
            self._pool.publish(host_block_id, block_hash)
        self._planned.swap_out.append(BlockCopy(block_id, host_block_id))
        return host_block_id

    def _count_eviction(self, host_block_id: int, block_hash: bytes) -> None:
        self.num_evicted_blocks += 1
