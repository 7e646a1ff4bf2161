"""The health of a worker's ranks, as values for heartbeats, metrics, and logs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class GroupHealth:
    ranks_up: tuple[bool, ...] = (True,)  # whether each rank has loaded and responds
    messages_behind: tuple[int, ...] = (0,)  # unread messages of rank 0, by rank
    channel_wait_seconds: float = 0.0  # time that rank 0 has waited for free slots of the channel
    step_skew_seconds: float = 0.0  # from the sending of the latest message to its last reading
    all_reduce_path: str = "none"  # own, symmetric_memory, nccl or gloo; none with one rank


ALONE = GroupHealth()


class Group(Protocol):
    """The ranks of a worker: a RankGroup of one host, or a SpanningGroup."""

    def health(self) -> GroupHealth:
        """Return the current health. Thread-safe and cheap."""

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        """Return the start phases of each reporting rank, with the monotonic seconds at which they began."""

    def blame(self) -> None:
        """Report the rank that ended, if it can be found. Call when a collective has failed."""

    def set_on_end(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` in another thread, with a description, when the end of a rank is noticed.

        Without it such an end ends this process.
        """

    def dump_stacks(self) -> None:
        """Let the other ranks of this host write their stacks to stderr."""

    def close(self) -> None:
        """End the group, for programs that continue without it."""
