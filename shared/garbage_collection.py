"""Settings of Python's cyclic garbage collector: rare collections, and none of objects that stay forever.

A step's events are thousands of small objects, so the default thresholds cause several collections per step: a sixth of
a gateway's CPU time per token with 1,000 streams. A full collection stops all streams while it visits the vocabulary
or torch: 50 ms every 3 s in a worker with 1,000 streams.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000  # threshold of the youngest generation; each connection leaves five cyclic objects of asyncio
# With 0 every second collection is a middle one, which visits what is new since the last, 0.6 us or more per object. A
# gateway with 2,000 connections stopped for up to 131 ms with (20,000, 10), for 66 with (10,000, 2), and for 30 with 0.
MIDDLE_EVERY, OLD_EVERY = 0, 120


@contextmanager
def no_searches() -> Iterator[None]:
    """Disable collections during imports, whose objects all stay. Saves a seventh of the time of `import torch`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def search_rarely() -> None:
    """Exclude all current objects from collections, and make those rare. Call after loading."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_EVERY, OLD_EVERY)
