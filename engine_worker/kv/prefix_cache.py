"""Finds computed blocks to reuse: published by content hash, matched by the longest common prefix.

Full blocks are shared. They are published in the schedule that computes them, so a sequence admitted in the same step
can share them: a layer stores the KV of all tokens of a step before its attention reads any. Tokens after the last full
block are reused by copying the block published last under the same prefix (full, or the partly filled end of a sequence
that ended). The copy runs before the forward pass, so its source must be of an earlier step.

A block is wanted if a second sequence used it, or a preempted sequence will need it; wanted blocks are worth a copy in
host memory when they are evicted. The hash of a block is SHA-256 of the previous block's hash and its own token ids:

    root(tenant, salt) -> hash of block 0 -> hash of block 1 -> ...

A hash names a whole prefix, including tenant and salt: a hit needs no comparison of tokens, and timing reveals no other
tenant's prompts. SHA-256 prevents forged collisions; it takes 60 ns per token with blocks of 16 (AMD Zen 4). All groups
of layers use the same hashes; a block's key is (group, hash). A prefix is a hit only if every group has its blocks.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.group_hits import GroupHit, longest_common_hit
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpans

_TOKEN_BYTES = 4


def cache_root(tenant: str, salt: str) -> bytes:
    """Return the start of a request's hash chain. Requests with different roots share no blocks."""
    return sha256(f"{len(tenant)}:{tenant}{salt}".encode()).digest()


def pack_token_ids(token_ids: list[int]) -> bytes:
    """Return token ids as native uint32 bytes."""
    return array("I", token_ids).tobytes()


def extend_digests(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Extend `sequence.kv.digests` to `num_blocks` blocks, whose tokens must all be known."""
    digests = sequence.kv.digests
    first = len(digests)
    if num_blocks <= first:
        return
    packed = pack_token_ids(sequence.token_ids(first * block_size, num_blocks * block_size))
    digest = digests[-1] if first else sequence.kv.cache_root
    size = block_size * _TOKEN_BYTES
    for start in range(0, len(packed), size):
        digest = sha256(digest + packed[start : start + size]).digest()
        digests.append(digest)


def parent_digest(sequence: Sequence, index: int) -> bytes:
    """Return the digest before block `index` of `sequence`. The digests of earlier blocks must exist."""
    return sequence.kv.digests[index - 1] if index else sequence.kv.cache_root


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix hit: in each group blocks to share, then blocks to fetch from the host; or one block to copy.

    Of a copied block, the first `num_copied_tokens` are used. It is copied only if every group has it.
    """

    num_blocks: int  # full blocks of the prefix
    groups: tuple[GroupHit, ...]
    copied_block_ids: SequenceOf[int] = ()  # one per group, or none
    num_copied_tokens: int = 0

    @property
    def block_ids(self) -> list[int]:
        """The blocks to share, of all groups."""
        return [block_id for hit in self.groups for block_id in hit.block_ids]

    @property
    def host_block_ids(self) -> list[int]:
        """The blocks to fetch, of all groups."""
        return [block_id for hit in self.groups for block_id in hit.host_block_ids]

    @property
    def num_device_blocks(self) -> int:
        """The full blocks of the prefix that every group has on the device."""
        return self.num_blocks - self.num_host_blocks

    @property
    def num_host_blocks(self) -> int:
        """The full blocks of the prefix that not every group has on the device."""
        return max(len(hit.host_block_ids) for hit in self.groups)

    def shortened(self, num_tokens: int, block_size: int) -> "PrefixMatch":
        """Return the match of the first `num_tokens` tokens.

        They end at a block, in the copied one, or in one on the device, which is then copied.
        """
        num_blocks, num_copied = divmod(num_tokens, block_size)
        copied = self.copied_block_ids if num_copied else ()
        if num_copied and num_blocks < self.num_blocks:
            copied = tuple(hit.block_ids[num_blocks] for hit in self.groups)
        else:
            assert num_copied <= self.num_copied_tokens
        groups = tuple(
            GroupHit(0, hit.block_ids[:num_blocks], hit.host_block_ids[: max(0, num_blocks - len(hit.block_ids))])
            for hit in self.groups
        )
        return PrefixMatch(num_blocks, groups, copied, num_copied)

    def without_copy(self) -> "PrefixMatch":
        return replace(self, copied_block_ids=(), num_copied_tokens=0)


class _Child(NamedTuple):
    block_ids: list[int]  # one per group
    packed_token_ids: bytes


class PrefixCache:
    """The published blocks of one device pool. BlockPool owns references and evicts."""

    def __init__(self, pool: BlockPool, spans: KVSpans) -> None:
        self._pool = pool
        self._spans = spans.groups
        self._num_groups = len(spans.groups)
        self._finds = (pool.find,) * len(spans.groups)
        self._has_windows = any(span.window for span in spans.groups)
        self._block_size = spans.block_size
        self._children: dict[bytes, _Child] = {}  # parent digest -> the blocks published last under it
        self._parents: dict[int, bytes] = {}  # the same by block id
        self._partly_filled: set[int] = set()
        self._wanted: set[int] = set()  # block ids, all published
        self._last_step, self._of_last_step = -1, set[int]()  # a step, and the blocks that it fills

    def match(self, sequence: Sequence, step: int) -> PrefixMatch:
        """Return the longest cached prefix of the tokens that need not be computed."""
        limit = self.num_reusable_tokens(sequence)
        num_blocks = limit // self._block_size
        extend_digests(sequence, num_blocks, self._block_size)
        digests = sequence.kv.digests[:num_blocks]
        keys = [[(group, digest) for digest in digests] for group in range(self._num_groups)]
        num_found, hits = longest_common_hit(self._spans, keys, self._finds)
        found = PrefixMatch(num_found, tuple(GroupHit(first, block_ids) for first, block_ids in hits))
        return self._with_copy(sequence, found, limit, step)

    def can_copy(self, block_ids: Iterable[int], step: int) -> bool:
        """Return whether these published blocks are filled before `step` makes its copies."""
        return self._last_step < step or self._of_last_step.isdisjoint(block_ids)

    def num_reusable_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens need not be computed if they are cached.

        With a window, the end of a prompt that forks is always computed: its forks start there, and a longer hit would
        lack blocks that they see.
        """
        if self._has_windows and sequence.sampling.num_sequences > 1:
            return min(sequence.num_reusable_tokens, sequence.num_prompt_tokens - 1)
        return sequence.num_reusable_tokens

    def publish(self, sequence: Sequence, num_computed_tokens: int, step: int) -> None:
        """Publish the blocks of `sequence` that `step` completes and whose tokens are known."""
        kv, block_size = sequence.kv, self._block_size
        num_full = min(num_computed_tokens, sequence.num_known_tokens) // block_size
        first = kv.num_published_blocks
        if num_full <= first:
            return
        extend_digests(sequence, num_full, block_size)
        packed = pack_token_ids(sequence.token_ids(first * block_size, num_full * block_size))
        size = block_size * _TOKEN_BYTES
        for index in range(first, num_full):
            start = (index - first) * size
            self._publish(sequence, index, kv.digests[index], packed[start : start + size], step)
        kv.num_published_blocks = num_full

    def publish_end(self, sequence: Sequence, step: int) -> None:
        """Publish what `sequence` has computed up to `step`, including the partly filled last block.

        Call it before the sequence frees its blocks.
        """
        kv = sequence.kv
        num_tokens = min(kv.num_computed_tokens, sequence.num_known_tokens)
        self.publish(sequence, num_tokens, step)
        index = num_tokens // self._block_size
        if num_tokens % self._block_size and not self._pool.is_shared(kv.tables[0].blocks[index]):
            packed = pack_token_ids(sequence.token_ids(index * self._block_size, num_tokens))
            digest = sha256(parent_digest(sequence, index) + packed).digest()
            self._partly_filled.update(self._publish(sequence, index, digest, packed, step))

    def retract(self, sequence: Sequence) -> None:
        """Remove all blocks of the prefix of `sequence` from the cache, including those that others computed."""
        for digest in sequence.kv.digests:
            for group in range(self._num_groups):
                if (block_id := self._pool.retract((group, digest))) is not None:
                    self.forget(block_id)

    def want(self, block_ids: Iterable[int]) -> None:
        """Mark published blocks as wanted."""
        self._wanted.update(self._pool.published(block_ids))

    def forget(self, block_id: int) -> tuple[bool, bool]:
        """Remove a block that the pool reallocates. Return whether it was full, and whether it was wanted."""
        parent = self._parents.get(block_id)
        if parent is not None:
            self._forget_child(parent)
        is_full, is_wanted = block_id not in self._partly_filled, block_id in self._wanted
        self._partly_filled.discard(block_id)
        self._wanted.discard(block_id)
        return is_full, is_wanted

    def _publish(self, sequence: Sequence, index: int, digest: bytes, packed: bytes, step: int) -> list[int]:
        """Publish block `index` in each group that holds it. Return the block ids that were not published before."""
        publish = self._pool.publish
        published = [
            table.blocks[index]
            for group, table in enumerate(sequence.kv.tables)
            if index >= table.num_released and publish(table.blocks[index], (group, digest))
        ]
        if step > self._last_step:
            self._last_step, self._of_last_step = step, set()
        if step == self._last_step:
            self._of_last_step.update(published)
        if len(published) == self._num_groups:  # otherwise another sequence may compute a part of it in a later step
            parent = parent_digest(sequence, index)
            if parent in self._children:
                self._forget_child(parent)
            self._children[parent] = _Child(published, packed)
            for block_id in published:
                self._parents[block_id] = parent
        return published

    def _forget_child(self, parent: bytes) -> None:
        child = self._children.pop(parent, None)
        if child is not None:
            for block_id in child.block_ids:
                del self._parents[block_id]

    def _with_copy(self, sequence: Sequence, found: PrefixMatch, limit: int, step: int) -> PrefixMatch:
        child = self._children.get(parent_digest(sequence, found.num_blocks))
        if child is None or not self.can_copy(child.block_ids, step):
            return found
        start = found.num_blocks * self._block_size
        cached = array("I", child.packed_token_ids)
        wanted = sequence.token_ids(start, min(start + len(cached), limit))
        num_equal = next((i for i, token_id in enumerate(wanted) if token_id != cached[i]), len(wanted))
        if not num_equal:
            return found
        return replace(found, copied_block_ids=child.block_ids, num_copied_tokens=num_equal)
