"""How the ranks of a worker are, as values for who tells of them. Made by its group; it knows no process.

It is used beside every walk: heartbeats, metrics and log lines tell of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class GroupHealth:
    ranks_up: tuple[bool, ...] = (True,)  # whether it has loaded and lives; one that ends, ends the group
    messages_behind: tuple[int, ...] = (0,)  # by rank, what rank 0 has told and it has not read
    channel_wait_seconds: float = 0.0  # of rank 0, for others to read what was in the way
    step_skew_seconds: float = 0.0  # from the sending of the latest message to its reading by the last rank
    all_reduce_path: str = "none"  # what sums over the ranks: own, symmetric_memory, nccl, gloo; none of one rank


ALONE = GroupHealth()


class Group(Protocol):
    """The ranks of a worker: a RankGroup of one host, or a SpanningGroup."""

    def health(self) -> GroupHealth:
        """From any thread; costs nothing."""

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        """Return, of each other rank that tells, the phases of its start and the monotonic seconds they began at."""

    def blame(self) -> None:
        """To be called where a collective failed: the rank that ended is told of, where it can be seen."""

    def tell_end_to(self, hear: Callable[[str], None]) -> None:
        """Have `hear` called, in another thread, when a rank ends that can be seen, with what is known of it.

        Before that such an end ends this process.
        """

    def dump_stacks(self) -> None:
        """Have the other ranks write their stacks to stderr, where they can be asked."""

    def close(self) -> None:
        """End the group. For programs that go on without it."""
