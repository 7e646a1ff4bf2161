"""Histograms of how long blocks stay active, how long prefixes stay cached, and how long swaps take.

Plain counts (0.1 us per change of a block), so that no step updates a Prometheus histogram block by block; a scrape
copies them. The clock is an argument.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
# A block of an 8B model takes 40 us on a PCIe 5 link, 1 GiB 18 ms.
SWAP_SECONDS_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class DurationCounts:
    """A histogram: `counts[i]` durations are at most `bounds[i]` seconds and above the previous bound."""

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
    clock: Callable[[], float] = lambda: 0.0  # monotonic, in seconds
    active: DurationCounts = field(default_factory=_of_blocks)  # from the first reference to the end of the last
    cached: DurationCounts = field(default_factory=_of_blocks)  # from then until reuse or eviction
    swap_out: DurationCounts = field(default_factory=_of_swaps)  # of all transfers of one batch in one direction
    swap_in: DurationCounts = field(default_factory=_of_swaps)

    def copy(self) -> "KVDurations":
        counts = (self.active, self.cached, self.swap_out, self.swap_in)
        return KVDurations(self.clock, *(each.copy() for each in counts))
