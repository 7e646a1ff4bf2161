"""KV blocks in host memory: those of swapped sequences, and full blocks that the device's prefix cache evicted.

Blocks are matched by key: content that is already on the host is not copied again, and content that is on the device
is not fetched. So sequences with a common prefix are swapped out with one copy of it. The KVCacheManager decides
whether a transfer is worth its time.
"""

from collections.abc import Iterable, Iterator

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.host_blocks import HostBlocks
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID, BlockKey, Table


class HostTier(HostBlocks):
    def __init__(self, num_blocks: int, device_pool: BlockPool, block_size: int) -> None:
        """Create the tier. `num_blocks` includes block 0, which is never used, as on the device."""
        super().__init__(num_blocks)
        self._device_pool = device_pool
        self._block_size = block_size

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
                        stored[block_id] = host_block_id = self.store(block_id, key)
                    else:
                        self._pool.share([host_block_id])
                    table.host_blocks.append(host_block_id)
        return len(self._planned.swap_out) - num_before

    def trim(self, sequence: Sequence) -> None:
        """Free the host blocks of a swapped sequence that hold no computed tokens."""
        num_blocks = -(-sequence.kv.num_computed_tokens // self._block_size)
        for table in sequence.kv.tables:
            self.free(table.host_blocks[max(num_blocks, table.num_released) :])
            del table.host_blocks[max(num_blocks, table.num_released) :]

    def on_device(self, sequence: Sequence) -> list[int | None]:
        """Return, for each of kv.host_blocks, the device block with the same content, or None."""
        find = self._device_pool.find
        return [None if key is None else find(key) for _, keys in self._keys(sequence) for key in keys]

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
