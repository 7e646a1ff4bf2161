"""The recurrent states of sequences: one live block each, and checkpoints from which later prompts continue.

A state block holds the states of all recurrent layers after a number of tokens. Unlike keys and values it is
overwritten by every step, so it is never shared: a hit, a fork and a checkpoint are copies.

    begin       block 0, which stays zero, or a checkpoint -> live
    checkpoint  live -> a block published under the hash of its tokens
    fork        live of the parent -> live of the child
    swap_out    live -> host memory; swap_in brings it back
    release     the live block itself becomes a checkpoint

A step with drafts does not advance the state, because some may be wrong. It keeps the inputs of its tokens in the
block. The next step applies those of the tokens that stand, which are pending until then.

Checkpoints are made where later prompts are likely to continue: each 2,048 prompt tokens, after the first message of a
chat, at the last multiple of 64 in a prompt, where two prompts diverge, and where a sequence ends. Prompt chunks end
there. Without a free or evictable block, a checkpoint is skipped; it never preempts a sequence.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from engine_worker.kv.block_pool import PADDING_BLOCK_ID, BlockPool
from engine_worker.kv.checkpoints import Checkpoints, StateHit
from engine_worker.kv.preemption import HostTierConfig
from engine_worker.kv.prefix_cache import PrefixMatch
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.transfers import BlockCopy, Moves

CHECKPOINT_TOKENS = 64  # a multiple of every KV block size, so that these prefixes have hashes
DISTANT_TOKENS = 2_048  # between checkpoints of a long prompt
# Other chats begin with the same first message, the system's. A shorter one is computed again in less time than one
# more chunk costs, and a longer one has distant checkpoints.
FIRST_MESSAGE_TOKENS = range(256, 8 * DISTANT_TOKENS)


class StateTables:
    """The live states of all sequences and the published checkpoints, in one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        host_tier: HostTierConfig | None = None,
    ) -> None:
        """Create the tables.

        Args:
            num_blocks: Blocks of the state pool, including block 0, which stays zero.
            block_size: Tokens of a KV block, whose hashes name checkpoints.
            enable_prefix_caching: Whether there are checkpoints.
            host_tier: None, or one without state blocks: states stay on the device.
        """
        self._checkpoints = Checkpoints(num_blocks, block_size, host_tier)
        self._pool = self._checkpoints.pool
        self._host = self._checkpoints.host
        self._publishes = enable_prefix_caching
        self._copies: list[BlockCopy] = []  # of the step being planned
        self._next_copies: list[BlockCopy] = []  # of states that the step being planned computes
        self._num_forks = 0  # leading entries of _copies that were planned by the last step and hold their blocks

    @property
    def pool(self) -> BlockPool:
        """The state blocks; read-only for callers."""
        return self._pool

    @property
    def has_room(self) -> bool:
        """Whether another sequence can begin."""
        return self._pool.num_available_blocks > 0

    @property
    def host_pool(self) -> BlockPool | None:
        """The state blocks in host memory, read-only for callers; None: states are not swapped."""
        return self._host.pool if self._host else None

    def longest_hit(
        self, sequence: Sequence, match: PrefixMatch, num_tokens: int, step: int, can_copy: Callable[[int], bool]
    ) -> StateHit:
        """Return the last checkpoint within a prefix whose KV is cached. See Checkpoints.longest_hit()."""
        return self._checkpoints.longest_hit(sequence, match, num_tokens, step, can_copy)

    def begin(self, sequence: Sequence, hit: StateHit, num_cached_tokens: int) -> None:
        """Give `sequence` a live state that continues from `hit`, and plan its checkpoints.

        Args:
            sequence: A sequence without a state.
            hit: Where it continues.
            num_cached_tokens: Tokens of its prefix whose KV is cached; further requests may diverge there.
        """
        if hit.is_on_host:
            self._fetch(sequence, hit.block_id)
        elif self._pool.is_cached(hit.block_id) and self._pool.num_available_blocks == 1:
            self._take_over(sequence, hit.block_id)
        else:
            self._copy_to_new(sequence, hit.block_id)
        if hit.num_tokens:
            self._checkpoints.want(sequence.kv.state_block)
        if self._publishes:
            branches = (num_cached_tokens, _end_of_first_message(sequence))
            sequence.kv.checkpoints = _checkpoints(sequence.num_prompt_tokens, hit.num_tokens, branches)

    def _take_over(self, sequence: Sequence, block_id: int) -> None:
        """Make the last available block, a checkpoint, the live state."""
        self._pool.share([block_id])
        self._checkpoints.overwrite(block_id)
        sequence.kv.state_block = block_id

    def _copy_to_new(self, sequence: Sequence, source: int) -> None:
        if source != PADDING_BLOCK_ID:
            self._checkpoints.want(source)
            self._pool.share([source])
            self._pool.hold(source)
        sequence.kv.state_block = self._allocate()
        if source != PADDING_BLOCK_ID:
            self._pool.free([source])
        self._copies.append(BlockCopy(source, sequence.kv.state_block))

    def _fetch(self, sequence: Sequence, host_block_id: int) -> None:
        assert self._host is not None
        self._host.share([host_block_id])  # first, because the allocation may evict a checkpoint to the host
        sequence.kv.state_block = self._allocate()
        self._host.fetch([host_block_id], [sequence.kv.state_block])
        self._host.free([host_block_id])

    def _allocate(self) -> int:
        (block_id,) = self._pool.allocate(1)
        self._checkpoints.unwant(block_id)
        return block_id

    def is_arriving(self, sequence: Sequence) -> bool:
        """Return whether the state of `sequence` comes from the host, and can be read only by the next batch."""
        return self._host is not None and self._host.is_arriving([sequence.kv.state_block])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` a copy of the state that the step being planned computes for `parent`."""
        child.kv.state_block = self._allocate()
        self._next_copies.append(BlockCopy(parent.kv.state_block, child.kv.state_block))
        self._pool.share(_blocks_of(self._next_copies[-1:]))  # until the next step has copied

    def checkpoint(self, sequence: Sequence, step: int) -> None:
        """Keep the state before the step being planned, if `sequence` has reached its next checkpoint."""
        kv = sequence.kv
        if not kv.checkpoints or kv.num_computed_tokens != kv.checkpoints[0]:
            return
        kv.checkpoints = kv.checkpoints[1:]
        if not self.has_room or self._checkpoints.has(sequence):
            return
        block_id = self._allocate()
        self._checkpoints.publish(sequence, block_id, step)
        if self._checkpoints.is_wanted(kv.state_block):
            self._checkpoints.want(block_id)
        self._pool.hold(block_id)  # no other copy of this step may write to it
        self._pool.free([block_id])
        self._copies.append(BlockCopy(kv.state_block, block_id))

    def can_swap_out(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether host memory has room for the states of these sequences together."""
        return self._host is not None and _num_live(sequences) <= self._host.pool.num_available_blocks

    def swap_out(self, sequence: Sequence) -> None:
        """Move the live state to host memory. Call can_swap_out() first."""
        kv = sequence.kv
        if kv.state_block == PADDING_BLOCK_ID:
            return
        assert self._host is not None and kv.host_state_block == PADDING_BLOCK_ID
        planned = {copy.target_block_id: copy.source_block_id for copy in self._copies}
        kv.host_state_block = self._host.store(planned.get(kv.state_block, kv.state_block), None)
        self._pool.free([kv.state_block])
        kv.state_block = PADDING_BLOCK_ID

    def can_swap_in(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether the device has room for the states of these sequences together."""
        num_swapped = sum(sequence.kv.host_state_block != PADDING_BLOCK_ID for sequence in sequences)
        return num_swapped <= self._pool.num_available_blocks

    def swap_in(self, sequence: Sequence) -> None:
        """Bring a state back from host memory, for the next batch. Call can_swap_in() first."""
        kv = sequence.kv
        if kv.host_state_block != PADDING_BLOCK_ID:
            self._fetch(sequence, kv.host_state_block)
            self._leave_host(sequence)

    def release(self, sequence: Sequence, step: int, *, is_wanted: bool = False) -> None:
        """Free the live state. It stays a checkpoint if its tokens are known and no copy to it is planned.

        Args:
            sequence: A sequence that ends or is preempted.
            step: The last step that computed it.
            is_wanted: Whether it comes back.
        """
        kv = sequence.kv
        self._leave_host(sequence)
        if kv.state_block == PADDING_BLOCK_ID:
            return
        block_id, kv.state_block, kv.checkpoints = kv.state_block, PADDING_BLOCK_ID, ()
        num_pending, kv.num_pending_tokens = kv.num_pending_tokens, 0
        is_known = 0 < kv.num_computed_tokens - num_pending <= sequence.num_known_tokens
        if self._publishes and is_known and not self._pool.is_shared(block_id):
            self._checkpoints.publish(sequence, block_id, step, num_pending)
            if is_wanted:
                self._checkpoints.want(block_id)
        self._pool.free([block_id])

    def discard(self, sequence: Sequence) -> None:
        """Free the state of a failed sequence, and remove the checkpoints of its prefix."""
        kv = sequence.kv
        self._checkpoints.discard(sequence)
        self._leave_host(sequence)
        if kv.state_block != PADDING_BLOCK_ID:
            self._pool.free([kv.state_block])
            kv.state_block, kv.checkpoints, kv.num_pending_tokens = PADDING_BLOCK_ID, (), 0

    def _leave_host(self, sequence: Sequence) -> None:
        kv = sequence.kv
        if kv.host_state_block != PADDING_BLOCK_ID:
            assert self._host is not None
            self._host.free([kv.host_state_block])
            kv.host_state_block = PADDING_BLOCK_ID

    def take_moves(self) -> Moves:
        """Return the moves that the planned step makes before its forward pass."""
        copies, self._copies, self._next_copies = self._copies, self._next_copies, []
        self._pool.free(_blocks_of(copies[: self._num_forks]))
        self._num_forks = len(self._copies)
        self._pool.release_held()
        moves = self._host.take_transfers() if self._host else Moves()
        moves.copies = copies
        return moves

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the pools agree with the states of `sequences`."""
        live = [[sequence.kv.state_block] for sequence in sequences if sequence.kv.state_block != PADDING_BLOCK_ID]
        self._pool.check_integrity([*live, _blocks_of(self._copies)])
        if self._host is not None:
            swapped = [sequence.kv.host_state_block for sequence in sequences]
            self._host.pool.check_integrity([[block_id] for block_id in swapped if block_id != PADDING_BLOCK_ID])


def _num_live(sequences: Iterable[Sequence]) -> int:
    return sum(sequence.kv.state_block != PADDING_BLOCK_ID for sequence in sequences)


def _blocks_of(copies: Iterable[BlockCopy]) -> list[int]:
    return [block_id for copy in copies for block_id in (copy.source_block_id, copy.target_block_id)]


def _end_of_first_message(sequence: Sequence) -> int:
    """Return the number of tokens up to the first one that ends a message; 0: it is not among FIRST_MESSAGE_TOKENS.

    Chat templates end each message with a token that also ends an answer, or begin the next one with it.
    """
    prompt, limit, found = sequence.prompt_token_ids, FIRST_MESSAGE_TOKENS.stop, []
    for token_id in sequence.stop_token_ids:
        with suppress(ValueError):  # index() is faster than a loop
            found.append(prompt.index(token_id, 1, limit) + 1)
    return first if (first := min(found, default=0)) in FIRST_MESSAGE_TOKENS else 0


def _checkpoints(num_prompt_tokens: int, start: int, branches: Iterable[int]) -> tuple[int, ...]:
    """Return the positions in a prompt, after `start`, where its state is kept.

    `branches`: tokens after which further requests may continue differently.
    """
    ends = (num_prompt_tokens - 1, *branches)
    wanted = {end // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS for end in ends}
    wanted.update(range(DISTANT_TOKENS, num_prompt_tokens, DISTANT_TOKENS))
    return tuple(sorted(position for position in wanted if start < position < num_prompt_tokens))
