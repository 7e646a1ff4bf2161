"""Four policies that reserve KV slots, with one interface (KVAllocator), so that the same scheduler runs with each.

    max      the model's whole context, contiguous                             Orca (Max)
    pow2     prompt + the next power of two of the output, contiguous          Orca (Pow2)
    oracle   prompt + the exact future output, contiguous                      Orca (Oracle), impossible in practice
    paged    blocks on demand: the engine's own KVCacheManager                 PagedAttention

The first three use a buddy allocator, allocate everything at admission, and never preempt. The true output length is
sampling.max_tokens, because simulated requests ignore the end token.
"""

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from types import MappingProxyType

from bench.paper.buddy_allocator import BuddyAllocator
from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.kv_cache_manager import KVCacheManager
from engine_worker.kv.kv_events import KVEventLog
from engine_worker.kv.kv_stats import KVCacheStats
from engine_worker.kv.preemption import HostTierConfig, PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpans
from engine_worker.kv.transfers import Transfers

NUM_SLOTS = 15_700  # OPT-13B on 40 GB (table 1): 12 GB of KV at 800 KB per token
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048


class ReservationPolicy(StrEnum):
    MAX = "max"
    POW2 = "pow2"
    ORACLE = "oracle"
    PAGED = "paged"


def final_tokens(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.sampling.max_tokens


def reserved_tokens(policy: ReservationPolicy, sequence: Sequence, max_model_len: int) -> int:
    """Return the slots that a contiguous policy reserves for `sequence`, before rounding by the allocator."""
    if policy is ReservationPolicy.MAX:
        return max_model_len
    if policy is ReservationPolicy.POW2:
        output_tokens: int = 1 << (sequence.sampling.max_tokens - 1).bit_length()
        return min(max_model_len, sequence.num_prompt_tokens + output_tokens)
    assert policy is ReservationPolicy.ORACLE, policy
    return final_tokens(sequence)


class ReservedKVAllocator:
    """One contiguous run per sequence from admission to its end; its block table is the run in order.

    Growth, swap, sharing and forks do not occur: requests have one sequence, which is never preempted.
    """

    may_swap = has_states = False
    num_available_states = None
    state_pools: Mapping[str, BlockPool] = MappingProxyType({})
    device_pool = host_pool = None

    def __init__(self, num_blocks: int, block_size: int, reserve: Callable[[Sequence], int]) -> None:
        """Make a pool; `reserve` returns a sequence's slots, and `num_blocks` includes the padding block."""
        self.block_size = block_size
        self.spans = KVSpans.of((0,), block_size)
        self.events = KVEventLog()
        self._reserve = reserve
        self._buddies = BuddyAllocator(num_blocks - 1)

    @property
    def num_usable_blocks(self) -> int:
        return self._buddies.num_blocks

    @property
    def num_available_blocks(self) -> int:
        return self._buddies.num_blocks - self._buddies.num_allocated_blocks

    def missing(self, sequence: Sequence) -> int:
        """Return all blocks of `sequence` before admission, then 0."""
        return 0 if sequence.kv.tables[0].blocks else -(-self._reserve(sequence) // self.block_size)

    def needs_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return False

    def can_allocate(self, *sequences: Sequence) -> bool:
        (sequence,) = sequences
        return self._buddies.can_allocate(self.missing(sequence))

    def allocate(self, sequence: Sequence) -> None:
        if (num_blocks := self.missing(sequence)) > 0:
            first = 1 + self._buddies.allocate(num_blocks)  # block 0 is the padding
            sequence.kv.tables[0].blocks = list(range(first, first + num_blocks))

    def trim(self, sequence: Sequence) -> None:
        """Keep the reservation, which is for the whole request."""

    def retract(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the last computed tokens of `sequence` as not computed."""
        sequence.kv.num_computed_tokens -= num_tokens

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Admit the sequence if its run fits; a reservation never grows, so it needs no headroom."""
        if not self.can_allocate(sequence):
            return False
        self.allocate(sequence)
        return True

    def is_arriving(self, sequence: Sequence) -> bool:
        return False

    def preempt(self, sequences: Collection[Sequence]) -> PreemptionMode:
        raise NotImplementedError("reservations cannot be preempted")

    def try_swap_in(self, sequences: Collection[Sequence], headroom_blocks: int = 0) -> bool:
        raise NotImplementedError("reservations cannot be preempted")

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        return False

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        raise NotImplementedError("a reservation has one sequence")

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None: ...

    def take_checkpoint(self, sequence: Sequence) -> None: ...

    def release_outside_window(self) -> None:
        """Do nothing: a reservation is kept to the end."""

    def take_transfers(self) -> Transfers:
        return Transfers()

    def free(self, sequence: Sequence) -> None:
        self._buddies.free(sequence.kv.tables[0].blocks[0] - 1)
        sequence.kv.tables[0].blocks = []

    def discard(self, sequence: Sequence) -> None:
        self.free(sequence)

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        num_slots = sum(len(sequence.kv.tables[0].blocks) for sequence in running) * self.block_size
        return KVCacheStats(
            block_size=self.block_size,
            num_blocks=self.num_usable_blocks,
            num_free_blocks=self.num_available_blocks,
            num_cached_blocks=0,
            num_active_blocks=self._buddies.num_allocated_blocks,
            num_wasted_slots=num_slots - sum(sequence.kv.num_computed_tokens for sequence in running),
            sharing_ratio=0.0,
        )

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        self._buddies.check_integrity()
        blocks = [block_id for sequence in sequences for block_id in sequence.kv.tables[0].blocks]
        assert len(blocks) == len(set(blocks)) <= self._buddies.num_allocated_blocks, "a block is reserved twice"


def make_manager(
    policy: ReservationPolicy,
    num_slots: int = NUM_SLOTS,
    block_size: int = BLOCK_SIZE,
    max_model_len: int = MAX_MODEL_LEN,
) -> ReservedKVAllocator | KVCacheManager:
    num_blocks = num_slots // block_size + 1
    if policy is ReservationPolicy.PAGED:
        return KVCacheManager(num_blocks, block_size, enable_prefix_caching=False)  # the paper's system had none either
    return ReservedKVAllocator(
        num_blocks, block_size, lambda sequence: reserved_tokens(policy, sequence, max_model_len)
    )


def make_swapping_manager(num_slots: int = NUM_SLOTS, block_size: int = BLOCK_SIZE) -> KVCacheManager:
    """Make a paged manager that swaps to a host pool of four times as many slots, as this engine does on a GPU."""
    host_tier = HostTierConfig(num_blocks=4 * num_slots // block_size, preemption_mode=PreemptionMode.SWAP)
    return KVCacheManager(num_slots // block_size + 1, block_size, enable_prefix_caching=False, host_tier=host_tier)
