"""CPU seconds, corrected to those of an idle core of our machines.

Two processes on one core, or full caches, multiply the CPU time of the same work. A known piece of work before and
after shows by how much. Use it for limits that separate linear from quadratic work, never for a benchmark.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

NUM_TURNS = 200_000
TURNS_SECONDS = 0.001  # time of this many iterations of an empty loop on an idle core of 2025


def idle_seconds(work: Callable[[], object]) -> float:
    before = _pace()
    started = time.process_time()
    work()
    seconds = time.process_time() - started
    return seconds / max(1.0, before, _pace())


def _pace() -> float:
    """Return the current time of a loop relative to an idle core."""
    started = time.process_time()
    for _ in repeat(None, NUM_TURNS):
        pass
    return (time.process_time() - started) / TURNS_SECONDS


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """Return the CPU time of one thread of a process, or of all its current threads, in seconds."""
    tasks = Path(f"/proc/{pid}/task").glob(str(thread or "*"))
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def num_wakes(pid: int) -> int:
    """Return the number of waits of a process's current threads; each wait ends with a wake-up."""
    wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            wakes += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return wakes


def least_share(
    cpu_seconds: Callable[[], float], at_most: float, window_seconds: float = 2.0, windows: int = 10
) -> float:
    """Return the share of a core in the first window where it is `at_most`, else the minimum of all windows.

    A sleeping process wakes occasionally, and a wake-up between busy programs costs several times its CPU time, so one
    window is not enough. A spinning process takes a whole core in every window.
    """
    least = float("inf")
    for _ in range(windows):
        before = cpu_seconds()
        threading.Event().wait(window_seconds)  # the measured window, not a synchronization
        least = min(least, (cpu_seconds() - before) / window_seconds)
        if least <= at_most:
            break
    return least
