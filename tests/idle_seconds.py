"""CPU seconds as an idle core of our machines would take: what a busy neighbour or a slower core adds is taken off.

Two processes on one core, or full caches, make the same work take several times its CPU time. A known piece of work
just before and just after tells how much. For limits that separate linear from quadratic work; never for a benchmark.
"""

import time
from collections.abc import Callable
from itertools import repeat

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
