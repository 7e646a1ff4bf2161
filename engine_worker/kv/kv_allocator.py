"""The interface between the scheduler and an allocator of KV memory.

KVCacheManager implements it for serving. The benchmarks of the paper run the same scheduler with allocators that
reserve memory for a whole request (bench/paper/reservation.py).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.kv_events import KVEventLog
from engine_worker.kv.kv_stats import KVCacheStats
from engine_worker.kv.preemption import PreemptionMode
from engine_worker.kv.sequence import Sequence
from engine_worker.kv.span import KVSpans
from engine_worker.kv.transfers import Transfers


class KVAllocator(Protocol):
    """Allocates KV memory to sequences. Used by admission, step planning, and the debug views."""

    @property
    def block_size(self) -> int: ...
    @property
    def events(self) -> KVEventLog: ...
    @property
    def num_usable_blocks(self) -> int: ...
    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that no sequence uses."""

    @property
    def spans(self) -> KVSpans:
        """How many blocks a sequence holds, per group of layers."""

    @property
    def release_outside_window(self) -> Callable[[], None]:
        """Frees blocks that no attention window reaches; called before each step is planned."""

    @property
    def may_swap(self) -> bool:
        """Whether a preempted sequence may keep its KV in host memory."""

    @property
    def device_pool(self) -> BlockPool | None:
        """The device's blocks, read-only; None if memory is not divided into blocks."""

    @property
    def host_pool(self) -> BlockPool | None:
        """The host's blocks, read-only; None without a host tier."""

    @property
    def needs_room(self) -> Callable[[Sequence, int], bool]:
        """Returns whether a sequence with a number of tokens is missing blocks; called per sequence and step."""

    def can_allocate(self, *sequences: Sequence) -> bool:
        """Return whether all blocks that these sequences are missing are available together."""

    def allocate(self, sequence: Sequence) -> None:
        """Give `sequence` its missing blocks. Call can_allocate() first."""

    @property
    def trim(self) -> Callable[[Sequence], None]:
        """Takes back the blocks at the end of a sequence that its next step does not need, after wrong drafts."""

    def retract(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the last computed tokens of `sequence` as not computed, because they were wrong drafts."""

    def try_admit(self, sequence: Sequence, headroom_blocks: int = 0) -> bool:
        """Give a waiting sequence all blocks that it needs, if `headroom_blocks` stay available. Return success."""

    def is_arriving(self, sequence: Sequence) -> bool:
        """Return whether `sequence` cannot run in the batch being planned, because that batch fetches its KV."""

    def preempt(self, sequences: Collection[Sequence]) -> PreemptionMode:
        """Take all blocks of these sequences. Return whether they keep their KV in host memory."""

    def try_swap_in(self, sequences: Collection[Sequence], headroom_blocks: int = 0) -> bool:
        """Restore swapped sequences together, if `headroom_blocks` stay available. Return success."""

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Publish the blocks of `sequence` that the step being planned completes up to `num_computed_tokens`."""

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Return whether `parent` still holds all blocks that the token after `num_tokens` sees."""

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Start `child` with the first `num_tokens` computed tokens of `parent`."""

    @property
    def state_pools(self) -> Mapping[str, BlockPool]:
        """The existing pools of recurrent states by place, `device` and `host`; read-only."""

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states."""

    @property
    def num_available_states(self) -> int | None:
        """The sequences that can get a recurrent state; None: the model has none."""

    def take_checkpoint(self, sequence: Sequence) -> None:
        """Keep the recurrent state before the step being planned, if a checkpoint is due."""

    def take_transfers(self) -> Transfers:
        """Return the block moves planned since the last call, for one batch."""

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of `sequence`; computed ones stay cached."""

    def discard(self, sequence: Sequence) -> None:
        """Free all blocks of a failed `sequence`, and keep other sequences from sharing them."""

    def stats(self, running: Collection[Sequence]) -> KVCacheStats:
        """Return the counts of blocks. `running`: every sequence that has blocks."""

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Raise AssertionError unless the counts agree with the block tables of all `sequences`."""
