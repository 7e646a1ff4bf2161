"""Allocates KV blocks to sequences for serving: admission, preemption, swapping, and prefix reuse.

    AttentionTables  the blocks of each sequence, per group of layers: missing and shared ones
    StoredPrefixes   prefixes that other sequences computed, on the device and in host memory
    KVAccounting     events and totals

With the prefix cache, a sequence starts with the computed part of its prefix. With a host tier it also finds there what
the device evicted, and a preempted sequence can be swapped instead of recomputed (PagedAttention, section 4.5). The
scheduler decides who is admitted and who yields. Block moves are collected until take_transfers() adds them to a batch.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import zip_longest

from engine_worker.kv.attention_tables import AttentionTables
from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.checkpoints import StateHit
from engine_worker.kv.group_hits import GroupHit
from engine_worker.kv.host_tier import HostTier
from engine_worker.kv.kv_accounting import KVAccounting
from engine_worker.kv.kv_events import KVEventLog
from engine_worker.kv.kv_stats import KVCacheStats
from engine_worker.kv.preemption import HostTierConfig, PreemptionChoice, PreemptionMode
from engine_worker.kv.prefix_cache import PrefixMatch
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import NULL_BLOCK_ID, BlockKey, Table
from engine_worker.kv.span import KVSpans
from engine_worker.kv.state_tables import StateTables
from engine_worker.kv.stored_prefixes import StoredPrefixes
from engine_worker.kv.transfers import Moves, Transfers


class KVCacheManager:
    """The KVAllocator for serving: allocates blocks as they fill."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: SequenceOf[int] = (0,),
        max_new_tokens: int = 1,
        enable_prefix_caching: bool = True,
        host_tier: HostTierConfig | None = None,
        num_state_blocks: int = 0,
        events: KVEventLog | None = None,
    ) -> None:
        """Create the manager.

        Args:
            num_blocks: The executor's count, including block 0, which no sequence gets.
            block_size: Tokens per block.
            windows: Attention window of each group of layers, in tokens; 0: at least one layer of it has none.
            max_new_tokens: The most tokens of a sequence per step; used with windows.
            enable_prefix_caching: Whether sequences share computed prefixes.
            host_tier: None: no blocks in host memory.
            num_state_blocks: Blocks of the state pool, including block 0; 0: the model has no recurrent layers.
            events: Default: a new log.
        """
        self.block_size = block_size
        self.spans = KVSpans.of(windows, block_size, max_new_tokens)
        self.events = events or KVEventLog()
        self._accounting = KVAccounting(self.events, block_size)
        self._pool = BlockPool(num_blocks, self._on_evict, self.events.durations)
        self.tables = AttentionTables(self._pool, self.spans)
        self._host = HostTier(host_tier.num_blocks, self._pool, block_size) if host_tier else None
        self._prefixes = (
            StoredPrefixes(self._pool, self.tables, self._host, host_tier, self.spans)
            if enable_prefix_caching
            else None
        )
        self._states = (
            StateTables(num_state_blocks, block_size, enable_prefix_caching=enable_prefix_caching, host_tier=host_tier)
            if num_state_blocks
            else None
        )
        assert not num_state_blocks or not any(windows), "recurrent layers beside windows are not supported"
        self._no_hit = PrefixMatch(0, (GroupHit(),) * len(windows))
        can_swap_states = self._states.can_swap_out if self._states is not None else None
        self._preemption = PreemptionChoice(host_tier, self._host, self._pool, block_size, can_swap_states)
        # Bound methods of AttentionTables, because they are called per running sequence and step.
        self.needs_room, self.can_allocate = self.tables.needs_room, self.tables.can_allocate
        self.allocate, self.trim = self.tables.allocate, self.tables.trim
        self.release_outside_window = self.tables.release_outside_window

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states."""
        return self._states is not None

    @property
    def num_available_states(self) -> int | None:
        """The sequences that can get a recurrent state; None: the model has none."""
        return None if self._states is None else self._states.pool.num_available_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that no sequence uses."""
        return self._pool.num_available_blocks

    @property
    def may_swap(self) -> bool:
        """Whether a preempted sequence may keep its KV in host memory."""
        return self._preemption.may_swap

    @property
    def device_pool(self) -> BlockPool:
        """The device's blocks; read-only for callers."""
        return self._pool

    @property
    def host_pool(self) -> BlockPool | None:
        """The host's blocks, read-only for callers; None without a host tier."""
        return self._host.pool if self._host else None

    @property
    def state_pools(self) -> Mapping[str, BlockPool]:
        """The existing pools of recurrent states by place, `device` and `host`; read-only for callers."""
        if self._states is None:
            return {}
        pools = {"device": self._states.pool, "host": self._states.host_pool}
        return {place: pool for place, pool in pools.items() if pool is not None}

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Give a waiting sequence its cached prefix and all blocks it needs, if `headroom_blocks` stay available.

        num_computed_tokens of the sequence then counts the reused tokens. Use try_swap_in() for swapped sequences.

        Returns:
            Whether the sequence got its blocks.
        """
        assert not sequence.kv.is_on_host, f"{sequence.request_id} is swapped"
        if self._pool.num_available_blocks <= headroom_blocks or self.num_available_states == 0:
            return False  # saves the prefix lookup in each step while the queue waits: one new block is always needed
        match, state, num_cached_tokens = self._longest_hit(sequence)
        spare = self._num_spare(sequence, match) - headroom_blocks
        if spare < 0:
            return False
        if sum(map(self._pool.is_cached, match.copied_block_ids)) > spare:
            # Holding its sources for the copy would need more blocks than there are.
            match, state = self._without_copy(match, state)
            if self._num_spare(sequence, match) < headroom_blocks:
                return False
        self._begin(sequence, match)
        if self._states is not None:
            self._states.begin(sequence, state, num_cached_tokens)
            self.events.totals.hit_tokens_lost_for_state += num_cached_tokens - state.num_tokens
        num_host_tokens = match.num_host_blocks * self.block_size
        self._accounting.admitted(sequence, len(match.host_block_ids), num_host_tokens)
        return True

    def is_arriving(self, sequence: Sequence) -> bool:
        """Return whether `sequence` cannot run in the batch being planned, because that batch fetches its KV."""
        if self._states is not None and self._states.is_arriving(sequence):
            return True
        return self._host is not None and self._host.is_arriving(sequence.kv.blocks)

    def preempt(self, sequences: Collection[Sequence]) -> PreemptionMode:
        """Take all blocks of `sequences`, together. Return whether they keep their KV in host memory."""
        mode, reason = self._preemption.choose(sequences)
        if mode is PreemptionMode.SWAP:
            assert self._host is not None
            self._accounting.swapped_out(sequences, reason, self._host.swap_out(sequences))
        else:
            self._accounting.dropped(sequences, reason)
        for sequence in sequences:
            sequence.num_preemptions += 1
            sequence.num_tokens_when_preempted = sequence.num_tokens
            blocks = sequence.kv.blocks
            if self._prefixes and blocks:
                self._prefixes.publish_end(sequence, self._accounting.step - 1)
            if self._states is not None:
                if mode is PreemptionMode.SWAP:
                    self._states.swap_out(sequence)
                else:
                    self._states.release(sequence, self._accounting.step - 1, is_wanted=True)
            self._free_on_device(sequence)
            if mode is PreemptionMode.RECOMPUTE:
                if self._prefixes:
                    self._prefixes.want(blocks)
                sequence.num_dropped_tokens = max(sequence.num_dropped_tokens, sequence.kv.num_computed_tokens)
                sequence.kv.num_computed_tokens = 0
        return mode

    def try_swap_in(self, sequences: Collection[Sequence], headroom_blocks: int = 0) -> bool:
        """Restore swapped sequences with the blocks they need, together, if `headroom_blocks` stay available.

        Returns:
            Whether they were restored.
        """
        assert self._host is not None, "there is no host tier"
        here: dict[int, int] = {}  # host block id -> device block with the same content
        missing: set[int] = set()
        for sequence in sequences:
            for host_block_id, block_id in zip(sequence.kv.host_blocks, self._host.on_device(sequence), strict=True):
                if block_id is None:
                    missing.add(host_block_id)
                else:
                    here[host_block_id] = block_id
        growth = sum(self.tables.num_lacking(s) - _num_host_entries(s) for s in sequences)
        num_taken = len(missing) + growth + sum(map(self._pool.is_cached, set(here.values())))
        has_states = self._states is None or self._states.can_swap_in(sequences)
        if num_taken + headroom_blocks > self._pool.num_available_blocks or not has_states:
            return False
        for sequence in sequences:  # before any allocation, which could evict them
            self._pool.share(here[block_id] for block_id in sequence.kv.host_blocks if block_id in here)
        fetched: dict[int, int] = {}
        for sequence in sequences:
            for table in sequence.kv.tables:
                self._restore(table, here, fetched)
            self.tables.extend(sequence)
        self._host.fetch(list(fetched), list(fetched.values()))
        for sequence in sequences:
            self._come_back(sequence)
        self._accounting.swapped_in(sequences, len(fetched))
        return True

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Publish the blocks of `sequence` that the step being planned completes up to `num_computed_tokens`."""
        self.tables.advanced(sequence)
        if self._prefixes:
            self._prefixes.publish(sequence, num_computed_tokens, self._accounting.step)

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Return whether the parent still holds all that the token after `num_tokens` reads."""
        if self._states is not None and parent.kv.num_computed_tokens != num_tokens:
            return False
        return self.tables.can_fork(parent, num_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start `child` with the first `num_tokens` computed tokens of `parent`; see AttentionTables.fork()."""
        self.tables.fork(parent, child, num_tokens)
        if self._states is not None:
            assert parent.kv.num_computed_tokens == num_tokens, "a state is that of the last token"
            self._states.fork(parent, child)

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Keep the recurrent state before the step being planned, if a checkpoint is due."""
        if self._states is not None:
            self._states.checkpoint(sequence, self._accounting.step)

    def take_transfers(self) -> Transfers:
        """Return the block moves planned since the last call, which one batch carries out before its forward pass.

        Their sources are held until this call; freed ones can be allocated after it.
        """
        num_evicted_host_blocks = self._host.num_evicted_blocks if self._host else 0
        moves = self._host.take_transfers() if self._host else Moves()
        moves.copies = self.tables.take_copies()
        states = self._states.take_moves() if self._states is not None else Moves()
        self.events.totals.stored_states += len(states.swap_out)
        self.events.totals.fetched_states += len(states.swap_in)
        number = self._accounting.batch_is_planned(len(moves.copies), num_evicted_host_blocks)
        self._pool.release_held()
        return Transfers(moves, states, number)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks, on device and host. Computed content stays cached until its blocks are needed.

        The last block is freed first: so leaves are evicted before their prefixes, and without a cache, reallocated
        tables have their blocks in order.
        """
        if self._prefixes and sequence.kv.is_on_device:
            self._prefixes.publish_end(sequence, self._accounting.step - 1)
        if self._states is not None:
            self._states.release(sequence, self._accounting.step - 1)
        self._give_up(sequence)

    def retract(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the last computed tokens of `sequence` as not computed, because they were wrong drafts."""
        kv = sequence.kv
        if not (kv.is_on_device or kv.is_on_host):
            return  # preempted since: nothing counts as computed
        kv.num_computed_tokens -= num_tokens
        if kv.num_pending_tokens and not sequence.num_inflight_tokens:  # else they are those of the step in flight
            kv.num_pending_tokens -= num_tokens
        if self._host is not None and kv.is_on_host:
            self._host.trim(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Free all blocks of a failed sequence, and remove its whole prefix from the cache."""
        if self._prefixes:
            self._prefixes.retract(sequence)
        if self._states is not None:
            self._states.discard(sequence)
        self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        self._free_on_device(sequence)
        if sequence.kv.is_on_host:
            self._leave_host(sequence)

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """Return the counts of blocks. `running`: every sequence that has blocks."""
        active, references = self._pool.num_active_blocks, self._pool.num_references
        host_states = self._states.host_pool if self._states is not None else None
        return KVCacheStats(
            block_size=self.block_size,
            num_blocks=self._pool.num_usable_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_active_blocks=active,
            num_wasted_slots=self.tables.num_wasted_slots(running),
            sharing_ratio=1 - active / references if references else 0.0,
            num_host_blocks=self._host.pool.num_usable_blocks if self._host else 0,
            num_host_cached_blocks=self._host.pool.num_cached_blocks if self._host else 0,
            num_host_free_blocks=self._host.pool.num_free_blocks if self._host else 0,
            num_state_blocks=self._states.pool.num_usable_blocks if self._states else 0,
            num_free_state_blocks=self._states.pool.num_free_blocks if self._states else 0,
            num_cached_state_blocks=self._states.pool.num_cached_blocks if self._states else 0,
            num_host_state_blocks=host_states.num_usable_blocks if host_states else 0,
            num_free_host_state_blocks=host_states.num_free_blocks if host_states else 0,
            num_cached_host_state_blocks=host_states.num_cached_blocks if host_states else 0,
            group_blocks=tuple(
                sum(len(sequence.kv.tables[group].held) for sequence in running)
                for group in range(len(self.spans.groups))
            ),
        )

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pools agree with the block tables of all `sequences`."""
        self._pool.check_integrity(sequence.kv.blocks for sequence in sequences)
        if self._host:
            self._host.check_integrity(sequences)
        if self._states is not None:
            self._states.check_integrity(sequences)
        for sequence in sequences:
            kv = sequence.kv
            assert not (kv.is_on_device and kv.is_on_host), f"{sequence.request_id} is in two places"
            self.tables.check_integrity(sequence)
            for table in kv.tables:
                num_slots = (len(table.blocks) + len(table.host_blocks)) * self.block_size
                assert kv.num_computed_tokens <= num_slots, f"{sequence.request_id} computed outside its blocks"

    def _longest_hit(self, sequence: Sequence) -> tuple[PrefixMatch, StateHit, int]:
        """Return the longest reusable prefix, its recurrent state, and the tokens whose KV alone is cached."""
        if self._prefixes is None:
            return self._no_hit, StateHit(), 0
        step = self._accounting.step
        match = self._prefixes.longest_hit(sequence, step)
        num_tokens = match.num_blocks * self.block_size + match.num_copied_tokens
        if self._states is None:
            return match, StateHit(), num_tokens
        can_copy = partial(self._prefixes.can_copy, match, step=step)
        state = self._states.longest_hit(sequence, match, num_tokens, step, can_copy)
        return match.shortened(state.num_tokens, self.block_size), state, num_tokens

    def _without_copy(self, match: PrefixMatch, state: StateHit) -> tuple[PrefixMatch, StateHit]:
        """Return a hit without its copied block; with recurrent states none, because its state is after that block."""
        if self._states is None or not state.num_tokens:
            return match.without_copy(), state
        return self._no_hit, StateHit()

    def _num_spare(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Return the blocks that stay available if `sequence` begins with `match`; below 0: there are not enough."""
        # With a window the first step may need fewer blocks than a later one.
        num_needed = sum(
            max(number, span.max_blocks(sequence.num_tokens) - len(hit.block_ids))
            for number, span, hit in zip(
                self._num_new_blocks(sequence, match), self.spans.groups, match.groups, strict=True
            )
        )
        return self._pool.num_available_blocks - num_needed - sum(map(self._pool.is_cached, match.block_ids))

    def _num_new_blocks(self, sequence: Sequence, match: PrefixMatch) -> list[int]:
        """Return per group the blocks that the first step needs in addition to those of `match` on the device."""
        num_hit_tokens = match.num_blocks * self.block_size + match.num_copied_tokens
        return [
            span.num_blocks(num_hit_tokens, sequence.num_tokens) - hit.num_shared
            for span, hit in zip(self.spans.groups, match.groups, strict=True)
        ]

    def _begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        num_new = self._num_new_blocks(sequence, match)  # with a window, the copied tokens change the number
        if self._prefixes:
            self._prefixes.adopt(sequence, match, num_new, self._accounting.step)
        else:
            sequence.kv.tables = tuple(Table(self._pool.allocate(number)) for number in num_new)
            sequence.kv.num_computed_tokens = sequence.kv.num_published_blocks = 0

    def _restore(self, table: Table, here: dict[int, int], fetched: dict[int, int]) -> None:
        """Fill the table with a device block per host block: from `here`, or new and added to `fetched`."""
        table.blocks = [NULL_BLOCK_ID] * table.num_released
        for host_block_id in table.host_held:
            block_id = here.get(host_block_id)
            if block_id is None:
                block_id = fetched.get(host_block_id)
                if block_id is None:
                    (block_id,) = self._pool.allocate(1)
                    fetched[host_block_id] = block_id
                else:
                    self._pool.share([block_id])
            table.blocks.append(block_id)

    def _come_back(self, sequence: Sequence) -> None:
        self._leave_host(sequence)
        if self._states is not None:
            self._states.swap_in(sequence)
        self.publish(sequence, sequence.kv.num_computed_tokens)

    def _leave_host(self, sequence: Sequence) -> None:
        assert self._host is not None
        for table in sequence.kv.tables:
            self._host.free(table.host_held)
            table.host_blocks = []

    def _free_on_device(self, sequence: Sequence) -> None:
        self._pool.free(_from_last(sequence.kv.tables))
        for table in sequence.kv.tables:
            table.blocks = []
        sequence.kv.num_published_blocks = 0

    def _on_evict(self, block_id: int, key: BlockKey) -> None:
        assert self._prefixes is not None, "only the prefix cache publishes blocks that can be evicted"
        self._accounting.evicted(is_kept=self._prefixes.evict(block_id, key))


def _from_last(tables: tuple[Table, ...]) -> Iterable[int]:
    """Return the blocks, the last of all groups first: a prefix is useless without its blocks of one group."""
    if len(tables) == 1:
        return reversed(tables[0].held)
    entries = list(zip_longest(*(table.blocks for table in tables), fillvalue=NULL_BLOCK_ID))
    return (block_id for entry in reversed(entries) for block_id in entry if block_id != NULL_BLOCK_ID)


def _num_host_entries(sequence: Sequence) -> int:
    return sum(len(table.host_blocks) for table in sequence.kv.tables)
