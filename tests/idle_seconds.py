"""CPU seconds as an idle core of our machines would take: what a busy neighbour or a slower core adds is taken off.

Two processes on one core, or full caches, make the same work take several times its CPU time. A known piece of work
just before and just after tells how much. For limits that separate linear from quadratic work; never for a benchmark.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

NUM_TURNS = 200_000
TURNS_SECONDS = 0.001  # that many turns of an empty loop, on an idle core of 2025


def idle_seconds(work: Callable[[], object]) -> float:
    before = _pace()
    started = time.process_time()
    work()
    seconds = time.process_time() - started
    return seconds / max(1.0, before, _pace())


def _pace() -> float:
    """How many times as long as on an idle core a loop takes now."""
    started = time.process_time()
    for _ in repeat(None, NUM_TURNS):
        pass
    return (time.process_time() - started) / TURNS_SECONDS


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """The processor's time of one thread of a process, or of all that it has now, in seconds."""
    tasks = Path(f"/proc/{pid}/task").glob(str(thread or "*"))
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def num_wakes(pid: int) -> int:
    """How often the threads that a process has now have begun to wait: each wait is ended by a wake."""
    wakes = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            wakes += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return wakes


def least_share(
    cpu_seconds: Callable[[], float], at_most: float, window_seconds: float = 2.0, windows: int = 10
) -> float:
    """The share of a core that something takes, of the first window in which it is `at_most`, or of the least of all.

    What sleeps is woken now and then, and a wake-up between two busy programs costs it several times its CPU time: so
    one window does not tell. What spins takes a whole core in every one.
    """
    least = float("inf")
    for _ in range(windows):
        before = cpu_seconds()
        threading.Event().wait(window_seconds)  # what is measured, not a wait for anything
        least = min(least, (cpu_seconds() - before) / window_seconds)
        if least <= at_most:
            break
    return least
