"""How long blocks stay in use, how long prefixes stay cached, and how long swaps take: counts by bucket.

Kept here as plain numbers (0.1 us for each block that changes its state), so that no step feeds a Prometheus histogram
block by block; whoever scrapes copies them. Knows nothing of pools, and no clock but the one passed in. It stands
beside the walk of a block.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
# A block of an 8B-shaped model takes 40 us of a PCIe 5 link, a whole GiB 18 ms.
SWAP_SECONDS_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class DurationCounts:
    """`counts[i]` durations are at most `bounds[i]` seconds and over the bound before; the last one has the rest."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_seconds += seconds

    def copy(self) -> "DurationCounts":
        return DurationCounts(self.bounds, list(self.counts), self.sum_seconds)


def _of_blocks() -> DurationCounts:
    return DurationCounts(BLOCK_SECONDS_BUCKETS)


def _of_swaps() -> DurationCounts:
    return DurationCounts(SWAP_SECONDS_BUCKETS)


@dataclass(slots=True)
class KVDurations:
    clock: Callable[[], float] = lambda: 0.0  # monotonic
    active: DurationCounts = field(default_factory=_of_blocks)  # from a block's first reference to its last one's end
    cached: DurationCounts = field(default_factory=_of_blocks)  # from there until it is used again, or evicted
    swap_out: DurationCounts = field(default_factory=_of_swaps)  # of all transfers of one batch in one direction
    swap_in: DurationCounts = field(default_factory=_of_swaps)

    def copy(self) -> "KVDurations":
        counts = (self.active, self.cached, self.swap_out, self.swap_in)
        return KVDurations(self.clock, *(each.copy() for each in counts))
