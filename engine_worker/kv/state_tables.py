"""The recurrent states of sequences: one live block each, and checkpoints from which later prompts continue.

A state block holds the states of all recurrent layers after a number of tokens. Unlike keys and values it is
overwritten by every step, so it is never shared: a hit, a fork and a checkpoint are copies on the device.

    begin       block 0, which stays zero, or a checkpoint -> live
    checkpoint  live -> a block published under the hash of its tokens
    fork        live of the parent -> live of the child
    release     the live block itself becomes a checkpoint

Checkpoints are made where later prompts are likely to continue: each 2,048 prompt tokens, at the last multiple of 64 in
a prompt, where two prompts diverge, and where a sequence ends. Prompt chunks end there. Without a free or evictable
block, a checkpoint is skipped; it never preempts a sequence.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from engine_worker.kv.block_pool import PADDING_BLOCK_ID, BlockPool
from engine_worker.kv.prefix_cache import extend_digests, pack_token_ids, parent_digest
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import BlockKey
from engine_worker.kv.transfers import BlockCopy

CHECKPOINT_TOKENS = 64  # a multiple of every KV block size, so that these prefixes have hashes
DISTANT_TOKENS = 2_048  # between checkpoints of a long prompt
_STATE_GROUP = 0


@dataclass(frozen=True, slots=True)
class StateHit:
    """A checkpoint after `num_tokens` tokens; 0 tokens: none, and the state starts with zeros."""

    num_tokens: int = 0
    block_id: int = PADDING_BLOCK_ID


@dataclass(frozen=True, slots=True)
class _End:
    """A checkpoint that is not at the end of a KV block."""

    packed_token_ids: bytes  # since the last full KV block
    num_tokens: int
    block_id: int


class StateTables:
    """The live states of all sequences and the published checkpoints, in one pool."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        """Create the tables.

        Args:
            num_blocks: Blocks of the state pool, including block 0, which stays zero.
            block_size: Tokens of a KV block, whose hashes name checkpoints.
            enable_prefix_caching: Whether there are checkpoints.
        """
        self._pool = BlockPool(num_blocks, self._on_evict)
        self._block_size = block_size
        self._publishes = enable_prefix_caching
        self._copies: list[BlockCopy] = []  # of the step being planned
        self._next_copies: list[BlockCopy] = []  # of states that the step being planned computes
        self._num_forks = 0  # leading entries of _copies that were planned by the last step and hold their blocks
        self._written: dict[int, int] = {}  # published block -> the step whose copies or forward pass fill it
        self._ends: dict[bytes, _End] = {}  # parent digest -> the checkpoint published last in the block after it
        self._parents: dict[int, bytes] = {}  # the same by block id

    @property
    def pool(self) -> BlockPool:
        """The state blocks; read-only for callers."""
        return self._pool

    @property
    def has_room(self) -> bool:
        """Whether another sequence can begin."""
        return self._pool.num_available_blocks > 0

    def longest_hit(self, sequence: Sequence, num_full_blocks: int, num_tokens: int, step: int) -> StateHit:
        """Return the last checkpoint within a prefix whose KV is cached, filled by an earlier step.

        Args:
            sequence: Its digests cover the prefix.
            num_full_blocks: KV blocks of the prefix.
            num_tokens: Tokens of the prefix; the last ones may be a part of a block.
            step: The step being planned.
        """
        size = self._block_size
        end = self._ends.get(parent_digest(sequence, num_full_blocks))
        if end is not None and num_full_blocks * size + end.num_tokens <= num_tokens:
            start = num_full_blocks * size
            if pack_token_ids(sequence.token_ids(start, start + end.num_tokens)) == end.packed_token_ids:
                return StateHit(start + end.num_tokens, end.block_id)
        for index in range(num_full_blocks - 1, -1, -1):
            block_id = self._pool.find((_STATE_GROUP, sequence.kv.digests[index]))
            if block_id is not None and self._written[block_id] < step:
                return StateHit((index + 1) * size, block_id)
        return StateHit()

    def begin(self, sequence: Sequence, hit: StateHit, num_cached_tokens: int) -> None:
        """Give `sequence` a live state that continues from `hit`, and plan its checkpoints.

        Args:
            sequence: A sequence without a state.
            hit: Where it continues.
            num_cached_tokens: Tokens of its prefix whose KV is cached; further requests may diverge there.
        """
        if self._pool.is_cached(hit.block_id) and self._pool.num_available_blocks == 1:
            self._take_over(sequence, hit.block_id)
        else:
            self._copy_to_new(sequence, hit.block_id)
        if self._publishes:
            sequence.kv.checkpoints = _checkpoints(sequence.num_prompt_tokens, hit.num_tokens, num_cached_tokens)

    def _take_over(self, sequence: Sequence, block_id: int) -> None:
        """Make the last available block, a checkpoint, the live state."""
        self._pool.share([block_id])
        key = self._pool.blocks[block_id].key
        assert key is not None, "only published blocks are cached"
        self._pool.retract(key)
        self._forget(block_id)
        sequence.kv.state_block = block_id

    def _copy_to_new(self, sequence: Sequence, source: int) -> None:
        if source != PADDING_BLOCK_ID:
            self._pool.share([source])
            self._pool.hold(source)
        (sequence.kv.state_block,) = self._pool.allocate(1)
        if source != PADDING_BLOCK_ID:
            self._pool.free([source])
        self._copies.append(BlockCopy(source, sequence.kv.state_block))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` a copy of the state that the step being planned computes for `parent`."""
        (child.kv.state_block,) = self._pool.allocate(1)
        self._next_copies.append(BlockCopy(parent.kv.state_block, child.kv.state_block))
        self._pool.share(_blocks_of(self._next_copies[-1:]))  # until the next step has copied

    def checkpoint(self, sequence: Sequence, step: int) -> None:
        """Keep the state before the step being planned, if `sequence` has reached its next checkpoint."""
        kv = sequence.kv
        if not kv.checkpoints or kv.num_computed_tokens != kv.checkpoints[0]:
            return
        kv.checkpoints = kv.checkpoints[1:]
        extend_digests(sequence, kv.num_computed_tokens // self._block_size, self._block_size)
        key = _STATE_GROUP, kv.digests[kv.num_computed_tokens // self._block_size - 1]
        if not self.has_room or self._pool.find(key) is not None:
            return
        (block_id,) = self._pool.allocate(1)
        self._pool.publish(block_id, key)
        self._written[block_id] = step
        self._pool.hold(block_id)  # no other copy of this step may write to it
        self._pool.free([block_id])
        self._copies.append(BlockCopy(kv.state_block, block_id))

    def release(self, sequence: Sequence, step: int) -> None:
        """Free the live state. It stays a checkpoint if its tokens are known and no copy to it is planned."""
        kv = sequence.kv
        if kv.state_block == PADDING_BLOCK_ID:
            return
        block_id, kv.state_block, kv.checkpoints = kv.state_block, PADDING_BLOCK_ID, ()
        is_known = 0 < kv.num_computed_tokens <= sequence.num_known_tokens
        if self._publishes and is_known and not self._pool.is_shared(block_id):
            self._publish_end(sequence, block_id, step)
        self._pool.free([block_id])

    def discard(self, sequence: Sequence) -> None:
        """Free the live state of a failed sequence, and remove the checkpoints of its prefix."""
        kv = sequence.kv
        for digest in (kv.cache_root, *kv.digests):
            end = self._ends.get(digest)
            keys = [digest] if end is None else [digest, sha256(digest + end.packed_token_ids).digest()]
            for key in keys:
                if (block_id := self._pool.retract((_STATE_GROUP, key))) is not None:
                    self._forget(block_id)
        if kv.state_block != PADDING_BLOCK_ID:
            self._pool.free([kv.state_block])
            kv.state_block, kv.checkpoints = PADDING_BLOCK_ID, ()

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies that the planned step makes before its forward pass."""
        copies, self._copies, self._next_copies = self._copies, self._next_copies, []
        self._pool.free(_blocks_of(copies[: self._num_forks]))
        self._num_forks = len(self._copies)
        self._pool.release_held()
        return copies

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the pool agrees with the live states of `sequences`."""
        live = [[sequence.kv.state_block] for sequence in sequences if sequence.kv.state_block != PADDING_BLOCK_ID]
        self._pool.check_integrity([*live, _blocks_of(self._copies)])

    def _publish_end(self, sequence: Sequence, block_id: int, step: int) -> None:
        num_tokens, size = sequence.kv.num_computed_tokens, self._block_size
        index = num_tokens // size
        extend_digests(sequence, index, size)
        digest = parent_digest(sequence, index)
        packed = pack_token_ids(sequence.token_ids(index * size, num_tokens))
        key = _STATE_GROUP, sha256(digest + packed).digest() if packed else digest
        if not self._pool.publish(block_id, key):
            return
        self._written[block_id] = step
        if packed:
            if (older := self._ends.get(digest)) is not None:
                del self._parents[older.block_id]
            self._ends[digest] = _End(packed, num_tokens % size, block_id)
            self._parents[block_id] = digest

    def _on_evict(self, block_id: int, key: BlockKey) -> None:
        self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        del self._written[block_id]
        if (digest := self._parents.pop(block_id, None)) is not None:
            del self._ends[digest]


def _blocks_of(copies: Iterable[BlockCopy]) -> list[int]:
    return [block_id for copy in copies for block_id in (copy.source_block_id, copy.target_block_id)]


def _checkpoints(num_prompt_tokens: int, start: int, num_cached_tokens: int) -> tuple[int, ...]:
    """Return the positions in a prompt, after `start`, where its state is kept."""
    last = (num_prompt_tokens - 1) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    diverging = num_cached_tokens // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    wanted = {*range(DISTANT_TOKENS, num_prompt_tokens, DISTANT_TOKENS), last, diverging}
    return tuple(sorted(position for position in wanted if start < position < num_prompt_tokens))
