"""The phases of a start are timed when they are reported, on rank 0 and on each follower."""

from collections.abc import Callable

from engine_worker.execution.group_health import ALONE, GroupHealth
from engine_worker.execution.load.start_times import StartTimes, log_lines

PHASES = {1: [("interpreter", 1.0), ("import", 1.5), ("join", 6.0), ("serve", 9.0)]}


class Group:
    """A group whose follower has reported its phases."""

    def health(self) -> GroupHealth:
        return ALONE

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        return PHASES

    def blame(self) -> None: ...
    def set_on_end(self, on_end: Callable[[str], None]) -> None: ...
    def dump_stacks(self) -> None: ...
    def close(self) -> None: ...


def test_start_times_phase_lasts_until_the_next() -> None:
    now, reported = 1.0, list[tuple[str, float, str]]()
    times = StartTimes(lambda *report: reported.append(report), clock=lambda: now)
    times("load", 0.0, "torch")
    now = 3.0
    times("load", 0.0, "weights")
    now = 3.5
    times("load", 0.5, "1 GiB")  # progress of the same phase
    now = 4.0
    times("allocate_kv", 0.0, "")
    now = 4.25
    assert len(reported) == 4
    assert log_lines(times.by_rank(None)) == ["rank 0: torch 2.0 s, weights 1.0 s, allocate_kv 0.2 s"]
    assert times.by_rank(Group()) == {
        0: [("torch", 2.0), ("weights", 1.0), ("allocate_kv", 0.25)],
        1: [("interpreter", 0.5), ("import", 4.5), ("join", 3.0)],
    }
