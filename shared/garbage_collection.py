"""Settings of Python's cyclic garbage collector: rare collections, and none of objects that stay forever.

A step's events are thousands of small objects, so the default thresholds cause several collections per step: a sixth of
a gateway's CPU time per token with 1,000 streams. A full collection stops all streams while it visits the vocabulary
or torch: 50 ms every 3 s in a worker with 1,000 streams.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000  # threshold of the youngest generation; each connection leaves five cyclic objects of asyncio
# A middle collection visits what is new since the last one, 0.6 us per object. With 20,000 and 10 it stopped a gateway
# that got 2,000 connections for 131 ms.
MIDDLE_EVERY, OLD_EVERY = 2, 60


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
