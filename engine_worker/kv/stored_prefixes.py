"""The prefixes that other sequences computed: on the device in the prefix cache, and in host memory.

    longest_hit   the part of a sequence that need not be computed: blocks to share, to fetch, or one to copy
    adopt         start the sequence's block table with them
    evict         a device block is reallocated; its content goes to the host if it is worth a copy

KVCacheManager decides whether there is room.
"""

from engine_worker.kv.attention_tables import BlockTables
from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.host_tier import HostTier
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes
from engine_worker.kv.prefix_cache import PrefixCache, PrefixMatch
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID
from engine_worker.kv.span import KVSpan


class StoredPrefixes:
    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        host: HostTier | None,
        config: HostTierConfig | None,
        span: KVSpan,
    ) -> None:
        """Create the store.

        Args:
            pool: The device's blocks.
            tables: The device's block tables.
            host: None: no host tier.
            config: Of the host tier.
            span: The blocks that attention windows reach.
        """
        self._pool = pool
        self._tables = tables
        self._host = host
        self._costs = config.costs if config else None
        self._keeps_all = config is not None and config.offloaded_prefixes is OffloadedPrefixes.ALL
        self._cache = PrefixCache(pool, span)
        self._span = span
        self._block_size = span.block_size

    def longest_hit(self, sequence: Sequence, step: int) -> PrefixMatch:
        """Return the longest prefix of `sequence` that is stored and cheaper to fetch than to compute."""
        match = self._cache.match(sequence, step)
        if self._host is None:
            return match
        found = self._on_host(sequence, match, self._host)
        num_fetched, num_more = len(found.host_block_ids), found.num_blocks - match.num_blocks
        costs = self._costs
        if not num_fetched or (
            costs and costs.load_seconds(num_fetched) >= costs.compute_seconds(num_more * self._block_size)
        ):
            return match
        return found

    def _on_host(self, sequence: Sequence, match: PrefixMatch, host: HostTier) -> PrefixMatch:
        """Return `match` extended by blocks of the host; `match` without its copy if the host has none."""
        hashes, num_here = sequence.kv.block_hashes, match.num_blocks

        def find(index: int) -> int | None:
            if index >= num_here:
                return host.find(hashes[index])
            return match.block_ids[index - match.num_outside_window] if index >= match.num_outside_window else None

        limit = self._cache.num_reusable_tokens(sequence) // self._block_size
        first, ids = self._span.longest_hit(range(limit), find, num_here)
        if first + len(ids) <= num_here:
            return PrefixMatch(match.block_ids, num_outside_window=match.num_outside_window)
        num_shared = max(0, num_here - first)
        return PrefixMatch(ids[:num_shared], host_block_ids=ids[num_shared:], num_outside_window=first)

    def adopt(self, sequence: Sequence, match: PrefixMatch, num_new: int, step: int) -> None:
        """Begin the table of `sequence` with `match`, and complete it with `num_new` blocks, which are available."""
        num_shared = match.num_outside_window + len(match.block_ids)
        num_fetched = len(match.host_block_ids)
        self._pool.share(match.block_ids)
        source = match.copied_block_id
        if source is not None:
            self._pool.share([source])
            self._pool.hold(source)
        if self._host:
            self._host.share(match.host_block_ids)  # first, because the allocation may evict blocks to the host
        sequence.kv.block_table = (
            [NULL_BLOCK_ID] * match.num_outside_window + match.block_ids + self._pool.allocate(num_new)
        )
        sequence.kv.num_released_blocks = match.num_outside_window
        sequence.kv.num_computed_tokens = (num_shared + num_fetched) * self._block_size
        sequence.kv.num_published_blocks = num_shared
        if source is not None:
            self._tables.begin_with_copy(sequence, num_shared, source)
            sequence.kv.num_computed_tokens += match.num_copied_tokens
        if self._host and num_fetched:
            self._host.fetch(match.host_block_ids, sequence.kv.block_table[num_shared : num_shared + num_fetched])
            self._host.free(match.host_block_ids)
            self.publish(sequence, sequence.kv.num_computed_tokens, step)
        self._cache.want(sequence.kv.block_table[match.num_outside_window : num_shared + num_fetched])

    def publish(self, sequence: Sequence, num_computed_tokens: int, step: int) -> None:
        """Publish the blocks of `sequence` that `step` completes up to `num_computed_tokens`."""
        self._cache.publish(sequence, num_computed_tokens, step)

    def publish_end(self, sequence: Sequence, step: int) -> None:
        """Publish what `sequence` has computed up to `step`. Call it before the sequence frees its blocks."""
        self._cache.publish_end(sequence, step)

    def retract(self, sequence: Sequence) -> None:
        """Remove all blocks of a failed sequence, which may be the cause, from device and host."""
        self._cache.retract(sequence)
        if self._host:
            for block_hash in sequence.kv.block_hashes:
                self._host.retract(block_hash)

    def want(self, block_ids: list[int]) -> None:
        """Mark blocks that a preempted sequence will need again."""
        self._cache.want(block_ids)

    def evict(self, block_id: int, block_hash: bytes) -> bool:
        """Remove a block that the device reallocates. Return whether its content is kept on the host."""
        is_full, is_wanted = self._cache.forget(block_id)
        is_worth_it = is_full and (is_wanted or self._keeps_all)
        return is_worth_it and self._host is not None and self._host.keep(block_id, block_hash)
