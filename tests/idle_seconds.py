"""CPU seconds, corrected to an idle core: the extra time of busy neighbors and slower cores is subtracted.

Two processes on one core, or full caches, make the same work take several times its CPU time. A calibration loop just
before and just after measures the factor. Use it for limits that separate linear from quadratic work, not in
benchmarks.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

NUM_TURNS = 200_000
TURNS_SECONDS = 0.001  # iterations of an empty loop on an idle core of 2025


def idle_seconds(work: Callable[[], object]) -> float:
    before = _pace()
    started = time.process_time()
    work()
    seconds = time.process_time() - started
    return seconds / max(1.0, before, _pace())


def _pace() -> float:
    """Return how many times as long as on an idle core a loop takes now."""
    started = time.process_time()
    for _ in repeat(None, NUM_TURNS):
        pass
    return (time.process_time() - started) / TURNS_SECONDS


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """Return the CPU time of one thread, or of all present threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").glob(str(thread or "*"))
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def num_wakes(pid: int) -> int:
    """Return how often the present threads of a process were woken."""
    wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            lines = (task / "status").read_text().splitlines()
            wakes += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return wakes


def least_share(
    cpu_seconds: Callable[[], float], at_most: float, window_seconds: float = 2.0, windows: int = 10
) -> float:
    """Return the CPU share of the first window in which it is at most `at_most`, or else the smallest share.

    A sleeping process wakes now and then, and a wake-up between two busy programs costs several times its CPU time. So
    one
    window is not enough. A spinning process uses a whole core in every window.
    """
    least = float("inf")
    for _ in range(windows):
        before = cpu_seconds()
        threading.Event().wait(window_seconds)  # the measured interval, not a wait for an event
        least = min(least, (cpu_seconds() - before) / window_seconds)
        if least <= at_most:
            break
    return least
