"""Time the phases of a worker's start on each of its ranks.

times = StartTimes(report)                  passed on in place of `report`
log_lines(times.by_rank(runner.group))      "rank 0: torch 4.1 s, 2 ranks 1.0 s, ...", one line per rank
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
        """Wrap `report`. `clock` returns seconds of the machine's monotonic clock, as the channel of a group does."""
        self._report, self._clock = report, clock
        self._phases: list[tuple[str, float]] = []

    def __call__(self, phase: str, progress: float, detail: str) -> None:
        """Report, and start a new phase if its progress is 0."""
        if progress == 0.0:
            self._phases.append((detail or phase, self._clock()))
        self._report(phase, progress, detail)

    def by_rank(self, group: Group | None) -> dict[int, list[tuple[str, float]]]:
        """Return the seconds of each phase by rank. Call when all ranks have loaded."""
        followers = group.phases() if group is not None else {}
        found = {0: list(_durations([*self._phases, ("", self._clock())]))}
        return found | {rank: list(_durations(phases)) for rank, phases in followers.items()}


def log_lines(start: Mapping[int, Sequence[tuple[str, float]]]) -> list[str]:
    """Return one line per rank, for a log."""
    return [
        f"rank {rank}: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases)
        for rank, phases in start.items()
    ]


def _durations(phases: Sequence[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Yield the duration of each (phase, beginning) but the last, which only ends the previous one."""
    for (phase, began), (_, ended) in pairwise(phases):
        yield phase, ended - began
