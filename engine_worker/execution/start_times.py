"""The phases of a worker's start on each of its ranks, timed: where a slow start goes.

    times = StartTimes(report)              to be handed on in place of `report`
    told(times.by_rank(runner.group))       "rank 0: torch 4.1 s, 2 ranks 1.0 s, ...", and one of each follower

It is used once, at a start, around load.py. It measures nothing itself but what is reported. It does not know what a
phase does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from engine_worker.execution.group_health import Group

# phase ("load" | "allocate_kv" | "warmup"), progress 0..1, detail
Report: TypeAlias = Callable[[str, float, str], None]


class StartTimes:
    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: as the channel of a group has it, seconds of the machine's monotonic clock."""
        self._report, self._clock = report, clock
        self._phases: list[tuple[str, float]] = []

    def __call__(self, phase: str, progress: float, detail: str) -> None:
        """Report; what has made no progress begins."""
        if progress == 0.0:
            self._phases.append((detail or phase, self._clock()))
        self._report(phase, progress, detail)

    def by_rank(self, group: Group | None) -> dict[int, list[tuple[str, float]]]:
        """Seconds of each phase until now; of a follower's until it served. To be asked when all have loaded."""
        followers = group.phases() if group is not None else {}
        found = {0: list(_durations([*self._phases, ("", self._clock())]))}
        return found | {rank: list(_durations(phases)) for rank, phases in followers.items()}


def told(start: Mapping[int, Sequence[tuple[str, float]]]) -> list[str]:
    """Return a line of each rank, for a log."""
    return [
        f"rank {rank}: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases)
        for rank, phases in start.items()
    ]


def _durations(phases: Sequence[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield how long each of (phase, beginning) lasted; the last one only ends the one before."""
    for (phase, began), (_, ended) in pairwise(phases):
        yield phase, ended - began
