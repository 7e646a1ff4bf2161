"""The content of KV slots averaged over simulated time (figure 2), and the running sequences (figure 13).

tokens: KV of computed tokens, including this step's. reserved: kept for future tokens of the sequence. internal: kept
by a sequence that will end before using it. external: everything else, such as free runs that are too small, rounding
by the buddy allocator, and free blocks.
"""

from dataclasses import dataclass, field

from bench.paper.reservation import final_tokens
from engine_worker.scheduling.batch import ScheduledBatch

_HELD = ("tokens", "reserved", "internal")


@dataclass
class Occupancy:
    """Time-weighted sums; `shares()` normalizes them."""

    num_slots: int
    block_size: int
    seconds: float = 0.0
    _slot_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_HELD, 0.0))
    _sequence_seconds: float = 0.0

    def add(self, batch: ScheduledBatch, seconds: float) -> None:
        """Add a batch that takes `seconds`; no block is shared."""
        tokens = reserved = internal = 0
        for scheduled in batch.sequences:
            num_slots = len(scheduled.sequence.kv.tables[0].blocks) * self.block_size
            num_computed = scheduled.start + scheduled.num_new_tokens
            useful = min(num_slots, final_tokens(scheduled.sequence))
            tokens += num_computed
            reserved += useful - num_computed
            internal += num_slots - useful
        for name, count in zip(_HELD, (tokens, reserved, internal), strict=True):
            self._slot_seconds[name] += count * seconds
        self._sequence_seconds += len(batch.sequences) * seconds
        self.seconds += seconds

    @property
    def mean_sequences(self) -> float:
        return self._sequence_seconds / self.seconds

    def shares(self) -> dict[str, float]:
        """Return the shares of all slots, which sum to 1."""
        shares = {name: value / self.seconds / self.num_slots for name, value in self._slot_seconds.items()}
        return shares | {"external": 1.0 - sum(shares.values())}


@dataclass
class SharingSaving:
    """Blocks saved by sharing: block table entries beyond distinct blocks (figure 15)."""

    _entry_seconds: float = 0.0
    _block_seconds: float = 0.0

    def add(self, batch: ScheduledBatch, seconds: float) -> None:
        tables = [scheduled.sequence.kv.tables[0].blocks for scheduled in batch.sequences]
        self._entry_seconds += seconds * sum(map(len, tables))
        self._block_seconds += seconds * len(set().union(*tables))

    @property
    def ratio(self) -> float:
        return 1.0 - self._block_seconds / self._entry_seconds
