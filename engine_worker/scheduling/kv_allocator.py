"""The scheduler's questions to whoever gives sequences their KV slots: a Protocol, and nothing else.

KVCacheManager is the one that serves, in blocks as they fill. The benchmarks of the paper run the same scheduler over
others, which set memory aside for a whole request (bench/paper/reservation.py).

It is part of a block's walk: the scheduler asks for every token that needs a slot. It knows block ids, and no tensor.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from engine_worker.scheduling.batch import Transfers
from engine_worker.scheduling.block_pool import BlockPool
from engine_worker.scheduling.kv_events import KVEventLog
from engine_worker.scheduling.preemption import PreemptionMode
from engine_worker.scheduling.sequence import Sequence
from engine_worker.scheduling.stats import KVCacheStats


class KVAllocator(Protocol):
    """It has many members because it is asked by three: who is admitted and yields, a step's plan, what is shown."""

    @property
    def block_size(self) -> int: ...
    @property
    def events(self) -> KVEventLog: ...
    @property
    def num_usable_blocks(self) -> int: ...
    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be given out: free ones, and those of the prefix cache that no sequence uses."""

    @property
    def max_blocks(self) -> Callable[[int], int]:
        """The most blocks that a sequence holds at one time while it grows to so many tokens."""

    @property
    def release_outside_window(self) -> Callable[[], None]:
        """Get back what no window reaches any longer; asked before each step is planned."""

    @property
    def may_swap(self) -> bool:
        """Whether a preempted sequence may keep its KV in host memory."""

    @property
    def device_pool(self) -> BlockPool | None:
        """To look at; None where slots are no blocks of a pool."""

    @property
    def host_pool(self) -> BlockPool | None:
        """To look at; None if there is no host tier."""

    @property
    def needs_room(self) -> Callable[[Sequence, int], bool]:
        """Whether a sequence of so many tokens misses blocks: asked of every running one in every step."""

    def can_allocate(self, *sequences: Sequence) -> bool:
        """Whether all blocks that these miss together are available."""

    def allocate(self, sequence: Sequence) -> None:
        """Give `sequence` what it misses; the caller has asked can_allocate."""

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Give a waiting sequence all that it needs, if `headroom_blocks` would be left."""

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether `sequence` can't run in the batch being planned, because that batch fetches some of its KV."""

    def preempt(self, sequences: Collection[Sequence]) -> PreemptionMode:
        """Take all of these; the mode says whether they keep their KV in host memory."""

    def try_swap_in(self, sequences: Collection[Sequence], headroom_blocks: int = 0) -> bool:
        """Give swapped sequences back what they had and what they need, together."""

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The step that is being planned computes `sequence` to `num_computed_tokens`."""

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether `parent` still has all blocks of its first `num_tokens` tokens that the next token sees."""

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child` begins with `num_tokens` of the computed tokens of `parent`."""

    def take_transfers(self) -> Transfers:
        """The block moves planned since the last call, for one batch."""

    def free(self, sequence: Sequence) -> None:
        """Give up all that `sequence` has."""

    def discard(self, sequence: Sequence) -> None:
        """Give up all that a failed `sequence` has, and let no other sequence share it from now on."""

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """`running`: every sequence that has blocks."""

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless it agrees with the tables of `sequences`, which are all there are."""
