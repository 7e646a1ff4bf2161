"""The prefixes that other sequences computed: on the device in the prefix cache, and in host memory.

    longest_hit   the part of a sequence that need not be computed: blocks to share, to fetch, or one to copy
    adopt         start the sequence's block table with them
    evict         a device block is reallocated; its content goes to the host if it is worth a copy

KVCacheManager decides whether there is room.
"""

from collections.abc import Callable

from engine_worker.kv.attention_tables import AttentionTables
from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.group_hits import GroupHit, longest_common_hit
from engine_worker.kv.host_tier import HostTier
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes
from engine_worker.kv.prefix_cache import PrefixCache, PrefixMatch
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID, BlockKey, Table
from engine_worker.kv.span import KVSpans


class StoredPrefixes:
    def __init__(
        self,
        pool: BlockPool,
        tables: AttentionTables,
        host: HostTier | None,
        config: HostTierConfig | None,
        spans: KVSpans,
    ) -> None:
        """Create the store.

        Args:
            pool: The device's blocks.
            tables: The device's block tables.
            host: None: no host tier.
            config: Of the host tier.
            spans: The blocks that attention windows reach, per group.
        """
        self._pool = pool
        self._tables = tables
        self._host = host
        self._costs = config.costs if config else None
        self._keeps_all = config is not None and config.offloaded_prefixes is OffloadedPrefixes.ALL
        self._cache = PrefixCache(pool, spans)
        self._spans = spans
        self._block_size = spans.block_size

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
        digests, num_here = sequence.kv.digests, match.num_blocks

        def find_in(group: int, hit: GroupHit) -> Callable[[int], int | None]:
            def find(index: int) -> int | None:
                if index >= num_here:
                    return host.find((group, digests[index]))
                return hit.block_ids[index - hit.num_outside_window] if index >= hit.num_outside_window else None

            return find

        limit = range(self._cache.num_reusable_tokens(sequence) // self._block_size)
        finds = [find_in(group, hit) for group, hit in enumerate(match.groups)]
        num_found, hits = longest_common_hit(self._spans.groups, [limit] * len(finds), finds, num_here)
        if num_found <= num_here:
            return match.without_copy()
        return PrefixMatch(num_found, tuple(_divided(first, ids, num_here) for first, ids in hits))

    def can_copy(self, match: PrefixMatch, index: int, step: int) -> bool:
        """Return whether the device has full block `index` of a hit, filled before `step` makes its copies."""
        if index >= match.num_device_blocks:
            return False
        return self._cache.can_copy((hit.block_ids[index] for hit in match.groups), step)

    def adopt(self, sequence: Sequence, match: PrefixMatch, num_new: list[int], step: int) -> None:
        """Begin the tables of `sequence` with `match`, and complete each with its `num_new` blocks.

        The blocks must be available.
        """
        kv = sequence.kv
        self._pool.share(match.block_ids)
        self._pool.share(match.copied_block_ids)
        for source in match.copied_block_ids:
            self._pool.hold(source)
        if self._host:
            self._host.share(match.host_block_ids)  # first, because the allocation may evict blocks to the host
        kv.tables = tuple(
            Table(
                [NULL_BLOCK_ID] * hit.num_outside_window + hit.block_ids + self._pool.allocate(number),
                num_released=hit.num_outside_window,
            )
            for hit, number in zip(match.groups, num_new, strict=True)
        )
        kv.num_computed_tokens = match.num_blocks * self._block_size
        kv.num_published_blocks = match.num_blocks - match.num_host_blocks
        if match.copied_block_ids:
            self._tables.begin_with_copy(sequence, match.num_blocks, match.copied_block_ids)
            kv.num_computed_tokens += match.num_copied_tokens
        if self._host and match.host_block_ids:
            for table, hit in zip(kv.tables, match.groups, strict=True):
                end = hit.num_shared + len(hit.host_block_ids)
                self._host.fetch(hit.host_block_ids, table.blocks[hit.num_shared : end])
                self._host.free(hit.host_block_ids)
            self.publish(sequence, kv.num_computed_tokens, step)
        for table in kv.tables:
            self._cache.want(table.blocks[table.num_released : match.num_blocks])

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
            for digest in sequence.kv.digests:
                for group in range(len(self._spans.groups)):
                    self._host.retract((group, digest))

    def want(self, block_ids: list[int]) -> None:
        """Mark blocks that a preempted sequence will need again."""
        self._cache.want(block_ids)

    def evict(self, block_id: int, key: BlockKey) -> bool:
        """Remove a block that the device reallocates. Return whether its content is kept on the host."""
        is_full, is_wanted = self._cache.forget(block_id)
        is_worth_it = is_full and (is_wanted or self._keeps_all)
        return is_worth_it and self._host is not None and self._host.keep(block_id, key)


def _divided(first: int, block_ids: list[int], num_here: int) -> GroupHit:
    """Return the hit of one group whose blocks from `num_here` on are those of the host."""
    num_shared = max(0, num_here - first)
    return GroupHit(first, block_ids[:num_shared], block_ids[num_shared:])
