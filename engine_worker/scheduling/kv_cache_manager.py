"""The block tables of sequences: which blocks hold their KV, and whether more of it fits.

A sequence gets the blocks for all its tokens when it is admitted, and one more each time its output crosses a block's
edge; so a half-computed prompt never waits for memory. A forked sequence shares all blocks of its parent, the partly
filled last one too; a shared block is copied before somebody writes to it (copy-on-write, section 4.4 of the paper).
With the prefix cache a sequence starts with what others have computed of its prefix; with a host tier it also finds
there what the device has lost, and a preempted sequence can be swapped instead of computed again (section 4.5).

The scheduler says who is admitted and who yields. The block moves that this takes are collected until
take_transfers() gives them to the batch, and each is an event.

It is part of a block's walk: the scheduler asks here for every token that needs a slot, and gives back here what a
sequence leaves. It knows block ids, and no tensor.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from engine_worker.scheduling.batch import BlockCopy, Transfers
from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.host_tier import HostTier
from engine_worker.scheduling.kv_events import KVEventKind, KVEventLog
from engine_worker.scheduling.preemption import HostTierConfig, OffloadedPrefixes, PreemptionChoice, PreemptionMode
from engine_worker.scheduling.prefix_cache import PrefixCache, PrefixMatch
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.stats import KVCacheStats


class KVCacheManager:
    """Which blocks each sequence has. It has many members because pool, prefixes and host tier are one state."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        host_tier: HostTierConfig | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        """`num_blocks` is the executor's count and includes block 0, which no sequence ever gets."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self.events = events or KVEventLog()
        self._pool = BlockPool(num_blocks, self._on_evict, self.events.durations)
        self._prefix_cache = PrefixCache(self._pool, block_size) if enable_prefix_caching else None
        self._costs = host_tier.costs if host_tier else None
        self._keeps_all = host_tier is not None and host_tier.offloaded_prefixes is OffloadedPrefixes.ALL
        self._host = HostTier(host_tier.num_blocks, self._pool, block_size) if host_tier else None
        self._preemption = PreemptionChoice(host_tier, self._host, self._pool, block_size)
        self._block_copies: list[BlockCopy] = []
        self._evictions = [0, 0]  # of the batch being planned: dropped, kept on the host
        self._step = 0  # of the batch that is being planned

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be given out: free ones, and those of the prefix cache that no sequence uses."""
        return self._pool.num_available_blocks

    @property
    def may_swap(self) -> bool:
        """Whether a preempted sequence may keep its KV in host memory."""
        return self._preemption.may_swap

    @property
    def device_pool(self) -> BlockPool:
        """To look at; only the manager changes it."""
        return self._pool

    @property
    def host_pool(self) -> BlockPool | None:
        """To look at; None if there is no host tier."""
        return self._host.pool if self._host else None

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """Blocks that `sequence` needs to compute all its tokens: beyond its table, and to replace shared ones."""
        return -(-sequence.num_tokens // self.block_size) - len(sequence.block_table) + len(self._to_replace(sequence))

    def needs_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has missing blocks. Of one that decodes, it looks at its last block."""
        table = sequence.block_table
        if num_tokens > len(table) * self.block_size:
            return True
        is_shared = self._pool.is_shared
        for block_id in table[sequence.num_computed_tokens // self.block_size :]:  # noqa: SIM110 - any() takes twice as long
            if is_shared(block_id):
                return True
        return False

    def can_allocate(self, *sequences: Sequence) -> bool:
        """Whether all blocks that these miss together are available.

        Of those that share a block, the last to replace it keeps it if no other sequence holds it.
        """
        num_available = self._pool.num_available_blocks
        if len(sequences) == 1:
            return self.num_missing_blocks(sequences[0]) <= num_available
        num_missing = sum(map(self.num_missing_blocks, sequences))
        writers = Counter(s.block_table[index] for s in sequences for index in self._to_replace(s))
        num_kept = sum(number == self._pool.ref_count(block_id) for block_id, number in writers.items())
        return num_missing - num_kept <= num_available

    def allocate(self, sequence: Sequence) -> None:
        """Complete the block table and make its end writable; the caller has asked can_allocate."""
        self.prepare_write(sequence)
        sequence.block_table += self._pool.allocate(self.num_missing_blocks(sequence))

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Give a waiting sequence all blocks it needs, if `headroom_blocks` would be left, the cached prefix first.

        Its num_computed_tokens says then how much it need not compute. One that is swapped comes back by try_swap_in.
        """
        assert not sequence.host_block_table, f"{sequence.request_id} is swapped"
        if self._pool.num_available_blocks <= headroom_blocks:
            return False  # at least one new block is needed: a queue that waits is not looked up in every step
        match = self._match(sequence)
        num_new = self.num_missing_blocks(sequence) - len(match.block_ids)
        spare = self._pool.num_available_blocks - num_new - headroom_blocks
        spare -= sum(map(self._pool.is_cached, match.block_ids))
        if spare < 0:
            return False
        if match.copied_block_id is not None and self._pool.is_cached(match.copied_block_id) and spare == 0:
            match = replace(match, copied_block_id=None)  # keeping it for the copy would take one block too many
        self._adopt(sequence, match, num_new)
        return True

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether `sequence` can't run in the batch being planned, because that batch fetches some of its KV."""
        return self._host is not None and self._host.is_arriving(sequence.block_table)

    def preempt(self, sequences: Collection[Sequence]) -> PreemptionMode:
        """Take all blocks of `sequences`, together; the mode says whether they keep their KV in host memory."""
        mode, reason = self._preemption.choose(sequences)
        num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
        num_blocks = 0
        if mode is PreemptionMode.SWAP:
            assert self._host is not None
            num_blocks = self._host.swap_out(sequences)
            self.events.totals.swap_preemptions += 1
            self.events.totals.swapped_out_blocks += num_blocks
            self._record(KVEventKind.SWAP_OUT, sequences, reason, num_blocks, num_tokens)
        else:
            num_blocks = sum(len(sequence.block_table) for sequence in sequences)
            self.events.totals.recompute_preemptions += 1
            self._record(KVEventKind.RECOMPUTE, sequences, reason, num_blocks, num_tokens)
        for sequence in sequences:
            sequence.num_preemptions += 1
            sequence.num_tokens_when_preempted = sequence.num_tokens
            block_table = sequence.block_table
            self._free_on_device(sequence)
            if mode is PreemptionMode.RECOMPUTE:
                if self._prefix_cache:
                    self._prefix_cache.want(block_table)
                sequence.num_dropped_tokens = max(sequence.num_dropped_tokens, sequence.num_computed_tokens)
                sequence.num_computed_tokens = 0
        return mode

    def try_swap_in(self, sequences: Collection[Sequence], headroom_blocks: int = 0) -> bool:
        """Give swapped sequences their KV and the blocks they need, together, if `headroom_blocks` would be left."""
        assert self._host is not None, "there is no host tier"
        here: dict[int, int] = {}  # host block id -> device block with the same content
        missing: set[int] = set()
        for sequence in sequences:
            for host_block_id, block_id in zip(sequence.host_block_table, self._host.on_device(sequence), strict=True):
                if block_id is None:
                    missing.add(host_block_id)
                else:
                    here[host_block_id] = block_id
        growth = {s: self.num_missing_blocks(s) - len(s.host_block_table) for s in sequences}
        num_taken = len(missing) + sum(growth.values()) + sum(map(self._pool.is_cached, set(here.values())))
        if num_taken + headroom_blocks > self._pool.num_available_blocks:
            return False
        for sequence in sequences:  # before any allocation, which could evict them
            self._pool.share(here[block_id] for block_id in sequence.host_block_table if block_id in here)
        fetched: dict[int, int] = {}
        for sequence in sequences:
            self._restore_table(sequence, here, fetched)
            sequence.block_table += self._pool.allocate(growth[sequence])
        self._host.fetch(list(fetched), list(fetched.values()))
        for sequence in sequences:
            self._host.free(sequence.host_block_table)
            sequence.host_block_table = []
            self.publish(sequence, sequence.num_computed_tokens)
        self.events.totals.swapped_in_blocks += len(fetched)
        num_tokens = sum(sequence.num_computed_tokens for sequence in sequences)
        self._record(KVEventKind.SWAP_IN, sequences, "blocks are free again", len(fetched), num_tokens)
        return True

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The step that is being planned computes `sequence` to `num_computed_tokens`: others can share its blocks."""
        if self._prefix_cache:
            self._prefix_cache.publish(sequence, num_computed_tokens, self._step)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child` begins with `num_tokens` of the computed tokens of `parent`, and shares their blocks.

        O(1) a block. The last one may be partly filled, and may hold tokens of the parent behind those that are shared.
        """
        assert not child.block_table, f"{child.request_id} has blocks"
        assert num_tokens <= parent.num_computed_tokens, f"{parent.request_id} has not computed {num_tokens} tokens"
        assert child.num_tokens >= num_tokens, f"{child.request_id} lacks computed tokens"
        used = -(-num_tokens // self.block_size)
        child.block_table = parent.block_table[:used]
        child.num_computed_tokens = num_tokens
        child.cache_root = parent.cache_root
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]
        child.num_published_blocks = min(parent.num_published_blocks, len(child.block_hashes))
        self._pool.share(child.block_table)

    def prepare_write(self, sequence: Sequence) -> None:
        """Replace the shared blocks that the next step of `sequence` writes to; what is computed in them is copied."""
        for index in self._to_replace(sequence):
            source = sequence.block_table[index]
            (target,) = self._pool.allocate(1)
            if index * self.block_size < sequence.num_computed_tokens:
                self._pool.hold(source)
                self._block_copies.append(BlockCopy(source, target))
            self._pool.free([source])
            sequence.block_table[index] = target

    def take_transfers(self) -> Transfers:
        """The block moves planned since the last call, for one batch that does them before it computes anything.

        Until this call their sources are held: blocks that were freed meanwhile can be given out again after it.
        """
        self._record_evictions()
        if self._block_copies:
            num_copies = len(self._block_copies)
            self.events.totals.copied_blocks += num_copies
            self._record(KVEventKind.COPY, (), "a shared block is written to", num_copies, 0)
        transfers = self._host.take_transfers() if self._host else Transfers()
        transfers.block_copies, self._block_copies = self._block_copies, []
        transfers.batch_number = self._step
        self._step += 1
        self._pool.release_held()
        return transfers

    def free(self, sequence: Sequence) -> None:
        """Give up all blocks, on device and host; what is computed stays in the cache until its blocks are needed.

        Last block first: without a cache a table that is handed out again has its blocks in order, and with it leaves
        are evicted before their prefixes.
        """
        self._free_on_device(sequence)
        if sequence.host_block_table:
            assert self._host is not None
            self._host.free(sequence.host_block_table)
            sequence.host_block_table = []

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """`running`: every sequence that has blocks."""
        active, references = self._pool.num_active_blocks, self._pool.num_references
        return KVCacheStats(
            block_size=self.block_size,
            num_blocks=self._pool.num_usable_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_active_blocks=active,
            num_wasted_slots=self._num_wasted_slots(running),
            sharing_ratio=1 - active / references if references else 0.0,
            num_host_blocks=self._host.pool.num_usable_blocks if self._host else 0,
            num_host_cached_blocks=self._host.pool.num_cached_blocks if self._host else 0,
            num_host_free_blocks=self._host.pool.num_free_blocks if self._host else 0,
        )

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pools agree with the tables of `sequences`, which are all there are."""
        self._pool.check_integrity(sequence.block_table for sequence in sequences)
        if self._host:
            self._host.check_integrity(sequences)
        for sequence in sequences:
            assert not (sequence.block_table and sequence.host_block_table), f"{sequence.request_id} is in two places"
            num_slots = (len(sequence.block_table) + len(sequence.host_block_table)) * self.block_size
            assert sequence.num_computed_tokens <= num_slots, f"{sequence.request_id} computed outside its blocks"

    def _match(self, sequence: Sequence) -> PrefixMatch:
        if self._prefix_cache is None:
            return PrefixMatch([])
        match = self._prefix_cache.match(sequence, self._step)
        if self._host is None:
            return match
        last = sequence.num_reusable_tokens // self.block_size
        run = self._host.find_run(sequence.block_hashes[len(match.block_ids) : last])
        costs = self._costs
        if not run or (costs and costs.load_seconds(len(run)) >= costs.compute_seconds(len(run) * self.block_size)):
            return match
        return PrefixMatch(match.block_ids, host_block_ids=run)

    def _adopt(self, sequence: Sequence, match: PrefixMatch, num_new: int) -> None:
        num_shared, num_fetched = len(match.block_ids), len(match.host_block_ids)
        self._pool.share(match.block_ids)
        source = match.copied_block_id
        if source is not None:
            self._pool.share([source])
            self._pool.hold(source)
        if self._host:
            self._host.share(match.host_block_ids)  # before the allocation: what it evicts goes to the host
        sequence.block_table = match.block_ids + self._pool.allocate(num_new)
        sequence.num_computed_tokens = (num_shared + num_fetched) * self.block_size
        sequence.num_published_blocks = num_shared
        if source is not None:
            self._pool.free([source])
            self._block_copies.append(BlockCopy(source, sequence.block_table[num_shared]))
            sequence.num_computed_tokens += match.num_copied_tokens
        if self._host and num_fetched:
            self._host.fetch(match.host_block_ids, sequence.block_table[num_shared : num_shared + num_fetched])
            self._host.free(match.host_block_ids)
            self.publish(sequence, sequence.num_computed_tokens)
        if self._prefix_cache:
            self._prefix_cache.want(sequence.block_table[: num_shared + num_fetched])
        self._count_hits(sequence, num_fetched)

    def _count_hits(self, sequence: Sequence, num_fetched: int) -> None:
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.events.totals.cached_prompt_tokens += sequence.num_cached_tokens
        totals, num_host_tokens = self.events.totals, num_fetched * self.block_size
        totals.queried_tokens += sequence.num_tokens
        totals.device_hit_tokens += sequence.num_computed_tokens - num_host_tokens
        totals.host_hit_tokens += num_host_tokens
        totals.fetched_blocks += num_fetched
        if num_fetched:
            self._record(KVEventKind.FETCH, [sequence], "prefix found on the host", num_fetched, num_host_tokens)

    def _restore_table(self, sequence: Sequence, here: dict[int, int], fetched: dict[int, int]) -> None:
        """A device block for each host block: a shared one of `here`, or a new one, which `fetched` notes."""
        for host_block_id in sequence.host_block_table:
            block_id = here.get(host_block_id)
            if block_id is None:
                block_id = fetched.get(host_block_id)
                if block_id is None:
                    (block_id,) = self._pool.allocate(1)
                    fetched[host_block_id] = block_id
                else:
                    self._pool.share([block_id])
            sequence.block_table.append(block_id)

    def _free_on_device(self, sequence: Sequence) -> None:
        if self._prefix_cache and sequence.block_table:
            self._prefix_cache.publish_end(sequence, self._step - 1)
        self._pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_published_blocks = 0

    def _on_evict(self, block_id: int, block_hash: bytes) -> None:
        assert self._prefix_cache is not None, "only it publishes what can be evicted"
        is_full, is_wanted = self._prefix_cache.forget(block_id)
        is_worth_it = is_full and (is_wanted or self._keeps_all)
        is_kept = is_worth_it and self._host is not None and self._host.keep(block_id, block_hash)
        self._evictions[is_kept] += 1

    def _record_evictions(self) -> None:
        dropped, kept = self._evictions
        self._evictions = [0, 0]
        self.events.totals.evicted_blocks += dropped + kept
        self.events.totals.offloaded_blocks += kept
        self.events.totals.evicted_host_blocks = self._host.num_evicted_blocks if self._host else 0
        if dropped:
            self._record(KVEventKind.EVICT, (), "dropped", dropped, dropped * self.block_size)
        if kept:
            self._record(KVEventKind.EVICT, (), "to the host", kept, kept * self.block_size)

    def _record(
        self, kind: KVEventKind, sequences: Collection[Sequence], reason: str, num_blocks: int, num_tokens: int
    ) -> None:
        request_id = next((sequence.request_id for sequence in sequences), "")
        self.events.record(
            kind, self._step, request_id=request_id, reason=reason, num_blocks=num_blocks, num_tokens=num_tokens
        )

    def _num_wasted_slots(self, running: Iterable[Sequence]) -> int:
        """Slots of active blocks without a computed token; a shared block counts once, as its fullest owner has it."""
        filled: dict[int, int] = {}
        for sequence in running:
            for index in range(sequence.num_computed_tokens // self.block_size, len(sequence.block_table)):
                block_id = sequence.block_table[index]
                num_filled = max(0, sequence.num_computed_tokens - index * self.block_size)
                filled[block_id] = max(num_filled, filled.get(block_id, 0))
        return len(filled) * self.block_size - sum(filled.values())

    def _to_replace(self, sequence: Sequence) -> list[int]:
        """Indices of shared blocks in the part of the table that is not computed yet."""
        table = sequence.block_table
        first = sequence.num_computed_tokens // self.block_size
        return [index for index in range(first, len(table)) if self._pool.is_shared(table[index])]
