"""How a preempted sequence gets its KV back: from host memory (swap), or by computing it again (recompute).

The choice follows the setting, or the lower cost in seconds, from speeds measured at the worker's start
(TransferCosts). The whole swap time counts although swaps overlap with steps, which favors recompute. The step that a
swapped sequence misses while it is fetched does not count: it delays no other sequence, whereas recompute lengthens the
step of all. A group of sequences is swapped as a whole or not at all.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from engine_worker.kv.block_pool import BlockPool
from engine_worker.kv.host_tier import HostTier
from engine_worker.kv.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCosts:
    """Seconds to move KV between device and host, or to compute it again, from speeds measured at the worker's start.

    On an H200, a block of 16 tokens of an 8B model takes about 40 us over PCIe 5 and 360 us to compute, so swapping
    wins clearly; on slower links, or with small models, recompute may be faster.
    """

    block_bytes: int
    device_to_host_bytes_per_second: float
    host_to_device_bytes_per_second: float
    prefill_tokens_per_second: float
    fetch_seconds: float = 0.0  # fixed cost of a fetch from the host: the step that the sequence waits
    state_bytes: int = 0  # of a sequence's recurrent state

    def store_seconds(self, num_blocks: int) -> float:
        return num_blocks * self.block_bytes / self.device_to_host_bytes_per_second

    def link_seconds(self, num_blocks: int) -> float:
        """Return the time of the transfer from the host alone."""
        return num_blocks * self.block_bytes / self.host_to_device_bytes_per_second

    def load_seconds(self, num_blocks: int) -> float:
        """Return the time until blocks from the host can be used."""
        return self.fetch_seconds + self.link_seconds(num_blocks)

    def load_state_seconds(self) -> float:
        """Return the time until a recurrent state from the host can be used."""
        return self.fetch_seconds + self.state_bytes / self.host_to_device_bytes_per_second

    def swap_state_seconds(self) -> float:
        """Return the time to move a recurrent state out and in."""
        speeds = self.device_to_host_bytes_per_second, self.host_to_device_bytes_per_second
        return sum(self.state_bytes / speed for speed in speeds)

    def compute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_second


class PreemptionMode(StrEnum):
    """How a sequence that must yield its blocks gets its KV back."""

    AUTO = "auto"  # the cheaper one, by measured speeds
    SWAP = "swap"  # from host memory, as long as it has room
    RECOMPUTE = "recompute"


class OffloadedPrefixes(StrEnum):
    """Which prefixes are copied to host memory when the device evicts them."""

    REUSED = "reused"  # prefixes that a second request has used, and those of preempted sequences
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    num_blocks: int  # of the executor's host pool, block 0 included
    num_state_blocks: int = 0  # likewise; 0: recurrent states stay on the device
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    offloaded_prefixes: OffloadedPrefixes = OffloadedPrefixes.REUSED
    costs: TransferCosts | None = None  # None: a transfer always counts as cheaper than recompute


class PreemptionChoice:
    """Chooses between swap and recompute."""

    def __init__(
        self,
        config: HostTierConfig | None,
        host: HostTier | None,
        pool: BlockPool,
        block_size: int,
        can_swap_states: Callable[[Collection[Sequence]], bool] | None = None,
    ) -> None:
        """Create the choice. `can_swap_states`: whether host memory has room; None: the model has no states."""
        self._config = config
        self._can_swap_states = can_swap_states
        self._host = host
        self._pool = pool
        self._block_size = block_size

    @property
    def may_swap(self) -> bool:
        """Whether sequences may be swapped at all."""
        if self._config is None or self._config.preemption_mode is PreemptionMode.RECOMPUTE:
            return False
        return self._can_swap_states is None or self._config.num_state_blocks > 0

    def choose(self, sequences: Collection[Sequence]) -> tuple[PreemptionMode, str]:
        """Return SWAP or RECOMPUTE for all of `sequences` together, and the reason for events."""
        if self._host is None or self._config is None:
            return PreemptionMode.RECOMPUTE, "there is no host pool"
        if self._config.preemption_mode is PreemptionMode.RECOMPUTE:
            return PreemptionMode.RECOMPUTE, "by setting"
        if not any(sequence.kv.num_computed_tokens for sequence in sequences):
            return PreemptionMode.RECOMPUTE, "nothing is computed"
        if not self._has_room(self._host, sequences):
            return PreemptionMode.RECOMPUTE, "the host pool is full"
        return self._cheaper(self._host, sequences, self._config)

    def _has_room(self, host: HostTier, sequences: Collection[Sequence]) -> bool:
        return host.has_room(sequences) and (self._can_swap_states is None or self._can_swap_states(sequences))

    def _cheaper(
        self, host: HostTier, sequences: Collection[Sequence], config: HostTierConfig
    ) -> tuple[PreemptionMode, str]:
        if config.preemption_mode is PreemptionMode.SWAP:
            return PreemptionMode.SWAP, "by setting"
        costs = config.costs
        if costs is None or self._swap_seconds(host, sequences, costs) < self._compute_seconds(sequences, costs):
            return PreemptionMode.SWAP, "cheaper than computing again"
        return PreemptionMode.RECOMPUTE, "cheaper than swapping"

    def _swap_seconds(self, host: HostTier, sequences: Collection[Sequence], costs: TransferCosts) -> float:
        num_blocks = len({block_id for sequence in sequences for block_id in sequence.kv.blocks})
        seconds_of_kv = costs.store_seconds(host.num_blocks_to_store(sequences)) + costs.link_seconds(num_blocks)
        return seconds_of_kv + len(sequences) * costs.swap_state_seconds()

    def _compute_seconds(self, sequences: Collection[Sequence], costs: TransferCosts) -> float:
        """Return the seconds to compute the tokens that no other sequence keeps on the device."""
        num_computed = sum(sequence.kv.num_computed_tokens for sequence in sequences)
        num_shared = sum(map(self._num_shared, sequences))
        return costs.compute_seconds(max(0, num_computed - num_shared * self._block_size))

    def _num_shared(self, sequence: Sequence) -> int:
        """Return the shared blocks of the group that has most of them: a window keeps only a part of the prefix."""
        return max(sum(map(self._pool.is_shared, table.held)) for table in sequence.kv.tables)
