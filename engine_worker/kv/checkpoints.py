"""The recurrent states from which later prompts continue, by the hash of their tokens: on the device and on the host.

A checkpoint on the device is evicted when a sequence needs its block. It is then copied to host memory if a later
prompt probably needs it: the setting for KV blocks decides (OffloadedPrefixes), and a chat that has continued once is
expected to go on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from engine_worker.kv.block_pool import PADDING_BLOCK_ID, BlockPool
from engine_worker.kv.host_blocks import HostBlocks
from engine_worker.kv.preemption import HostTierConfig, OffloadedPrefixes
from engine_worker.kv.prefix_cache import PrefixMatch, extend_digests, pack_token_ids, parent_digest
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.sequence_kv import BlockKey

_STATE_GROUP = 0


@dataclass(frozen=True, slots=True)
class StateHit:
    """A checkpoint after `num_tokens` tokens; 0 tokens: none, and the state starts with zeros."""

    num_tokens: int = 0
    block_id: int = PADDING_BLOCK_ID
    is_on_host: bool = False


@dataclass(frozen=True, slots=True)
class _End:
    """A checkpoint that is not at the end of a KV block."""

    packed_token_ids: bytes  # since the last full KV block
    num_tokens: int
    key: BlockKey


class Checkpoints:
    def __init__(self, num_blocks: int, block_size: int, host_tier: HostTierConfig | None) -> None:
        """Create the pool of states. Arguments as for StateTables."""
        self.pool = BlockPool(num_blocks, self._on_evict)
        self.host: HostBlocks | None = None
        if host_tier is not None and host_tier.num_state_blocks:
            self.host = HostBlocks(host_tier.num_state_blocks, self._on_host_evict)
        self._costs = host_tier.costs if host_tier else None
        self._keeps_all = host_tier is not None and host_tier.offloaded_prefixes is OffloadedPrefixes.ALL
        self._block_size = block_size
        self._wanted = set[int]()  # device blocks that are copied to the host on eviction
        self._written: dict[int, int] = {}  # published block -> the step whose copies or forward pass fill it
        self._ends: dict[bytes, _End] = {}  # parent digest -> the checkpoint published last in the block after it
        self._parents: dict[BlockKey, bytes] = {}  # the same by key

    def longest_hit(
        self, sequence: Sequence, match: PrefixMatch, num_tokens: int, step: int, can_copy: Callable[[int], bool]
    ) -> StateHit:
        """Return the last checkpoint within a prefix whose KV is cached, filled by an earlier step.

        Args:
            sequence: Its digests cover the prefix.
            match: The KV of the prefix.
            num_tokens: Tokens of the prefix; the last ones may be a part of a block.
            step: The step being planned.
            can_copy: Returns whether this step can copy full block i of the match.
        """
        here = on_host = StateHit()
        for end, key in self._candidates(sequence, match, num_tokens, can_copy):
            block_id = self.pool.find(key)
            if block_id is not None and self._written[block_id] < step:
                here = StateHit(end, block_id)
                break
            if self.host is not None and not on_host.num_tokens and (found := self.host.find(key)) is not None:
                on_host = StateHit(end, found, is_on_host=True)
        return on_host if self._is_worth_fetching(on_host.num_tokens - here.num_tokens) else here

    def want(self, block_id: int) -> None:
        """Expect that a later prompt continues from this state, or from one after it."""
        self._wanted.add(block_id)

    def is_wanted(self, block_id: int) -> bool:
        return block_id in self._wanted

    def unwant(self, block_id: int) -> None:
        """Forget what was expected of the former state in a block."""
        self._wanted.discard(block_id)

    def publish(self, sequence: Sequence, block_id: int, step: int, num_pending: int = 0) -> None:
        """Publish the state in a block under the hash of the computed tokens of `sequence`, unless one is there.

        `num_pending`: the last of them, which the state does not contain.
        """
        num_tokens = sequence.kv.num_computed_tokens - num_pending
        digest, packed = self._tokens_of(sequence, num_tokens)
        key = _key(digest, packed)
        if not self.pool.publish(block_id, key):
            return
        self._written[block_id] = step
        if packed:
            if (older := self._ends.get(digest)) is not None and older.key != key:
                self._retract(older.key)
            self._ends[digest] = _End(packed, num_tokens % self._block_size, key)
            self._parents[key] = digest

    def has(self, sequence: Sequence) -> bool:
        """Return whether the device has the state after the computed tokens of `sequence`."""
        return self.pool.find(_key(*self._tokens_of(sequence, sequence.kv.num_computed_tokens))) is not None

    def overwrite(self, block_id: int) -> None:
        """Remove a checkpoint from the device, because a sequence overwrites its block."""
        key = self.pool.blocks[block_id].key
        assert key is not None, "only published blocks are cached"
        self.pool.retract(key)
        self._forget(block_id, key)

    def discard(self, sequence: Sequence) -> None:
        """Remove the checkpoints of a failed sequence's prefix, which may be the cause."""
        for digest in (sequence.kv.cache_root, *sequence.kv.digests):
            if (end := self._ends.get(digest)) is not None:
                self._retract(end.key)
            self._retract((_STATE_GROUP, digest))

    def _tokens_of(self, sequence: Sequence, num_tokens: int) -> tuple[bytes, bytes]:
        """Return what names the first tokens: the digest of those in full KV blocks, and the packed others."""
        size = self._block_size
        index = num_tokens // size
        extend_digests(sequence, index, size)
        return parent_digest(sequence, index), pack_token_ids(sequence.token_ids(index * size, num_tokens))

    def _candidates(
        self, sequence: Sequence, match: PrefixMatch, num_tokens: int, can_copy: Callable[[int], bool]
    ) -> Iterator[tuple[int, BlockKey]]:
        """Yield the lengths at which there may be a checkpoint, longest first, and its key.

        A checkpoint within a block needs a copy of the block.
        """
        size = self._block_size
        for index in range(match.num_blocks, -1, -1):
            start = index * size
            end = self._ends.get(parent_digest(sequence, index))
            has_block = index == match.num_blocks or (end is not None and can_copy(index))
            if end is not None and has_block and start + end.num_tokens <= num_tokens:
                packed = pack_token_ids(sequence.token_ids(start, start + end.num_tokens))
                if packed == end.packed_token_ids:
                    yield start + end.num_tokens, end.key
            if index:
                yield start, (_STATE_GROUP, sequence.kv.digests[index - 1])

    def _is_worth_fetching(self, num_more_tokens: int) -> bool:
        costs = self._costs
        if num_more_tokens <= 0:
            return False
        return costs is None or costs.load_state_seconds() < costs.compute_seconds(num_more_tokens)

    def _on_evict(self, block_id: int, key: BlockKey) -> None:
        if self.host is not None and (self._keeps_all or block_id in self._wanted):
            self.host.keep(block_id, key)
        self._forget(block_id, key)

    def _on_host_evict(self, key: BlockKey) -> None:
        if self.pool.find(key) is None:
            self._forget_end(key)

    def _retract(self, key: BlockKey) -> None:
        if self.host is not None:
            self.host.retract(key)
        if (block_id := self.pool.retract(key)) is not None:
            self._forget(block_id, key)
        self._forget_end(key)

    def _forget(self, block_id: int, key: BlockKey) -> None:
        del self._written[block_id]
        if self.host is None or self.host.find(key) is None:
            self._forget_end(key)

    def _forget_end(self, key: BlockKey) -> None:
        if (digest := self._parents.pop(key, None)) is not None:
            del self._ends[digest]


def _key(digest: bytes, packed_token_ids: bytes) -> BlockKey:
    return _STATE_GROUP, sha256(digest + packed_token_ids).digest() if packed_token_ids else digest
