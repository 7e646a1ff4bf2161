"""Records the history of the KV cache, as events and totals: preemptions, evictions, copies, hits, and fetches."""

from collections.abc import Collection

from engine_worker.kv.kv_events import KVEventKind, KVEventLog
from engine_worker.kv.sequence import Sequence


class KVAccounting:
    def __init__(self, events: KVEventLog, block_size: int) -> None:
        self.events = events
        self.step = 0  # number of the batch that is being planned
        self._block_size = block_size
        self._dropped, self._kept = 0, 0  # evicted blocks of that batch: dropped, and copied to the host

    def evicted(self, *, is_kept: bool) -> None:
        """Record an evicted block. `is_kept`: whether it is copied to the host."""
        self._kept += is_kept
        self._dropped += not is_kept

    def swapped_out(self, sequences: Collection[Sequence], reason: str, num_blocks: int) -> None:
        """Record a preemption by swapping. `num_blocks`: blocks that are copied."""
        self.events.totals.swap_preemptions += 1
        self.events.totals.swapped_out_blocks += num_blocks
        self._record(KVEventKind.SWAP_OUT, sequences, reason, num_blocks, _num_computed(sequences))

    def dropped(self, sequences: Collection[Sequence], reason: str) -> None:
        """Record a preemption by recompute."""
        num_blocks = sum(len(sequence.kv.blocks) for sequence in sequences)
        self.events.totals.recompute_preemptions += 1
        self._record(KVEventKind.RECOMPUTE, sequences, reason, num_blocks, _num_computed(sequences))

    def swapped_in(self, sequences: Collection[Sequence], num_blocks: int) -> None:
        """Record the return of swapped sequences. `num_blocks`: blocks that are copied."""
        self.events.totals.swapped_in_blocks += num_blocks
        reason = "blocks are free again"
        self._record(KVEventKind.SWAP_IN, sequences, reason, num_blocks, _num_computed(sequences))

    def admitted(self, sequence: Sequence, num_fetched: int, num_host_tokens: int) -> None:
        """Record the prefix hit of an admitted sequence.

        `num_fetched` blocks come from the host, and `num_host_tokens` of the hit are not on the device in every group.
        """
        totals = self.events.totals
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.kv.num_computed_tokens, sequence.num_prompt_tokens)
            totals.cached_prompt_tokens += sequence.num_cached_tokens
        totals.queried_tokens += sequence.num_tokens
        totals.device_hit_tokens += sequence.kv.num_computed_tokens - num_host_tokens
        totals.host_hit_tokens += num_host_tokens
        totals.fetched_blocks += num_fetched
        if num_fetched:
            self._record(KVEventKind.FETCH, [sequence], "prefix found on the host", num_fetched, num_host_tokens)

    def batch_is_planned(self, num_copies: int, num_evicted_host_blocks: int) -> int:
        """Record the copies and evictions of the planned batch, return its number, and start the next one."""
        totals, dropped, kept = self.events.totals, self._dropped, self._kept
        self._dropped = self._kept = 0
        totals.evicted_blocks += dropped + kept
        totals.offloaded_blocks += kept
        totals.evicted_host_blocks = num_evicted_host_blocks
        if dropped:
            self._record(KVEventKind.EVICT, (), "dropped", dropped, dropped * self._block_size)
        if kept:
            self._record(KVEventKind.EVICT, (), "to the host", kept, kept * self._block_size)
        if num_copies:
            totals.copied_blocks += num_copies
            self._record(KVEventKind.COPY, (), "a shared block is written to", num_copies, 0)
        self.step += 1
        return self.step - 1

    def _record(
        self, kind: KVEventKind, sequences: Collection[Sequence], reason: str, num_blocks: int, num_tokens: int
    ) -> None:
        request_id = next((sequence.request_id for sequence in sequences), "")
        self.events.record(
            kind, self.step, request_id=request_id, reason=reason, num_blocks=num_blocks, num_tokens=num_tokens
        )


def _num_computed(sequences: Collection[Sequence]) -> int:
    return sum(sequence.kv.num_computed_tokens for sequence in sequences)
