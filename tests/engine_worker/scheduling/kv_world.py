"""A KV cache manager with the memory it manages, driven by single operations in any order.

A slot contains a hash of all tokens up to its own, like the KV of a real slot. Its content therefore exposes a block
that is shared for a wrong prefix, not copied, or reused too early. check() runs after every operation and compares the
manager's counts with the tables and every computed slot with its expected content.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes, PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpans
from tests.builders import make_sequence

_GARBAGE = -1
NEW_TOKENS = 7  # the limit per sequence and step, with a window


def contents(token_ids: list[int]) -> list[int]:
    """Return the expected slot contents of these tokens; each depends on all tokens before it."""
    return _contents(tuple(token_ids))


@lru_cache(maxsize=10_000)  # every sequence is checked after every operation; one of ten has changed
def _contents(token_ids: tuple[int, ...]) -> list[int]:
    values, value = [], 0
    for token_id in token_ids:
        value = crc32(token_id.to_bytes(4, "little"), value)
        values.append(value)
    return values


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A sequence to admit, its output tokens if it was preempted, and how many tokens to compute at once."""

    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 100


class KVWorld:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        windows: SequenceOf[int] = (0,),
    ) -> None:
        """Create the manager and its memory.

        With a host pool, preempted sequences are swapped while the pool has room. `windows`: one per group; with
        one that is not 0, a sequence computes at most NEW_TOKENS per step.
        """
        self.spans = KVSpans.of(windows, block_size, NEW_TOKENS)
        self._has_windows = any(windows)
        host_tier = HostTierConfig(
            num_blocks=num_host_blocks,
            preemption_mode=PreemptionMode.SWAP,
            offloaded_prefixes=OffloadedPrefixes.ALL,
        )
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            windows=windows,
            max_new_tokens=NEW_TOKENS,
            enable_prefix_caching=enable_prefix_caching,
            host_tier=host_tier if num_host_blocks else None,
        )
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.num_operations = 0
        self.num_copies = 0
        self.num_cached_tokens = 0
        self.num_swapped_blocks = 0
        self._memory = [[_GARBAGE] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._host_memory = [[_GARBAGE] * block_size for _ in range(num_host_blocks)]
        self._is_caching = enable_prefix_caching
        self._num_sequences = 0

    def fork(self, parent: Sequence, num_dropped: int = 0) -> Sequence:
        """Fork without the last `num_dropped` computed tokens; the child has others there, and gets blocks for them."""
        if num_dropped:
            self.manager.release_outside_window()
        num_tokens = max(0, parent.kv.num_computed_tokens - num_dropped)
        if not self.manager.can_fork(parent, num_tokens):
            num_tokens = parent.kv.num_computed_tokens
        prompt, others = parent.token_ids(0, num_tokens), parent.token_ids(num_tokens, parent.num_tokens)
        child = self._sequence(prompt, [token_id + 1 for token_id in others])
        self.manager.fork(parent, child, num_tokens)
        self.running.append(child)
        if num_tokens < parent.kv.num_computed_tokens:
            self._make_room_for(child)
            self._execute([])
        return child

    def leave(self, sequence: Sequence) -> None:
        """Free the blocks of a finished or aborted sequence on the device and on the host."""
        (self.running if sequence in self.running else self.swapped).remove(sequence)
        self.manager.free(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Run one step that only preempts `sequence`."""
        self.manager.release_outside_window()
        self._preempt(sequence)
        self._execute([])

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt; with recompute the sequence leaves, and a test may admit it again."""
        self.running.remove(sequence)
        if self.manager.preempt([sequence]) is PreemptionMode.SWAP:
            self.swapped.append(sequence)

    def compute(self, chosen: Iterable[tuple[Sequence, int]], newcomers: Iterable[Newcomer] = ()) -> None:
        """Run one step as the scheduler plans it.

        The chosen sequences get blocks, and the newest is preempted if there are none. Then each computes its number of
        tokens. Newcomers are admitted last and may share what this step computes.
        """
        self.manager.release_outside_window()
        # Running order, so that no sequence with allocated blocks is preempted.
        chosen = sorted(chosen, key=lambda pair: self.running.index(pair[0]))
        for sequence, _ in chosen:
            self._make_room_for(sequence)
        planned = [
            self._plan(sequence, num_tokens)
            for sequence, num_tokens in chosen
            if sequence in self.running and sequence.num_uncomputed_tokens > 0
        ]
        for newcomer in newcomers:
            admitted = self._admit(newcomer)
            if admitted is not None and not self.manager.is_arriving(admitted):
                planned.append(self._plan(admitted, newcomer.num_tokens))
        self._execute(planned)

    def swap_in(self, chosen: Iterable[Sequence]) -> None:
        """Run one step that swaps these sequences in, as long as there is room, and computes nothing."""
        self.manager.release_outside_window()
        for sequence in chosen:
            if self.manager.try_swap_in([sequence]):
                self.swapped.remove(sequence)
                self.running.append(sequence)
        self._execute([])

    def check(self) -> None:
        """Check counts and contents between steps, when no planned transfer is open."""
        self.num_operations += 1
        for sequence in self.running:
            self._check_contents(sequence)
            for table, span in zip(sequence.kv.tables, self.spans.groups, strict=True):
                num_held, max_held = len(table.held), span.max_blocks(sequence.num_tokens)
                assert num_held <= max_held, f"{sequence.request_id} holds {num_held} blocks; the limit is {max_held}"
        for sequence in self.swapped:
            self._check_contents(sequence, on_host=True)
        self.manager.check_integrity([*self.running, *self.swapped])

    def _make_room_for(self, sequence: Sequence) -> None:
        while sequence in self.running and not self.manager.can_allocate(sequence):
            self._preempt(self.running[-1])
        if sequence in self.running:
            self.manager.allocate(sequence)

    def _admit(self, newcomer: Newcomer) -> Sequence | None:
        sequence = self._sequence(newcomer.prompt_token_ids, newcomer.output_token_ids)
        if self.spans.max_blocks(sequence.num_tokens) > self.manager.num_usable_blocks or not self.manager.try_admit(
            sequence
        ):
            return None
        self.num_cached_tokens += sequence.kv.num_computed_tokens
        self.running.append(sequence)
        return sequence

    def _sequence(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> Sequence:
        self._num_sequences += 1
        return make_sequence(prompt_token_ids, f"s{self._num_sequences}", output_token_ids=output_token_ids)

    def _plan(self, sequence: Sequence, num_tokens: int) -> tuple[Sequence, int, int]:
        """Return the sequence and the range of positions that it computes."""
        start = sequence.kv.num_computed_tokens
        num_tokens = min(num_tokens, NEW_TOKENS) if self._has_windows else num_tokens
        end = start + min(num_tokens, sequence.num_uncomputed_tokens)
        self.manager.publish(sequence, end)
        if self._is_caching:
            self._check_published(sequence, start // self._block_size, end // self._block_size)
        return sequence, start, end

    def _execute(self, planned: list[tuple[Sequence, int, int]]) -> None:
        """Execute a step. Blocks are swapped out first and swapped in last, the latest allowed moment."""
        moves = self.manager.take_transfers().kv
        copies = moves.copies
        self.num_copies += len(copies)
        self.num_swapped_blocks += len(moves.swap_in)
        for copy in moves.swap_out:
            self._host_memory[copy.target_block_id] = list(self._memory[copy.source_block_id])
        targets = {copy.target_block_id for copy in copies}
        assert len(targets) == len(copies), "two copies into one block"
        assert not targets & {copy.source_block_id for copy in copies}, "the order of the copies matters"
        for copy in copies:
            self._memory[copy.target_block_id] = list(self._memory[copy.source_block_id])
        for sequence, start, end in planned:
            values = contents(sequence.token_ids(0, end))
            for position in range(start, end):
                for table in sequence.kv.tables:
                    block_id = table.blocks[position // self._block_size]
                    self._memory[block_id][position % self._block_size] = values[position]
            sequence.kv.num_computed_tokens = end
        for sequence, start, _ in planned:  # attention reads all earlier tokens in its window in this step
            self._check_contents(sequence)
            for table, span in zip(sequence.kv.tables, self.spans.groups, strict=True):
                num_released = table.num_released * self._block_size
                assert num_released <= (max(0, start - span.window + 1) if span.window else 0), (
                    "a block inside the window was released"
                )
        for copy in moves.swap_in:
            self._memory[copy.target_block_id] = list(self._host_memory[copy.source_block_id])

    def _check_contents(self, sequence: Sequence, *, on_host: bool = False) -> None:
        memory = self._host_memory if on_host else self._memory
        expected = contents(sequence.token_ids(0, sequence.kv.num_computed_tokens))
        for table in sequence.kv.tables:
            first = table.num_released * self._block_size
            slots = [
                value for block_id in (table.host_blocks if on_host else table.blocks) for value in memory[block_id]
            ]
            assert slots[first : len(expected)] == expected[first:], f"{sequence.request_id} has wrong contents"

    def _check_published(self, sequence: Sequence, first: int, end: int) -> None:
        """Check now: later, an equal block that is evicted first may replace a block in the cache."""
        assert len(sequence.kv.digests) >= end, f"{sequence.request_id} did not publish all of its {end} full blocks"
        for group, table in enumerate(sequence.kv.tables):
            for index in range(max(first, table.num_released), end):
                assert self.manager._pool.find((group, sequence.kv.digests[index])) is not None
