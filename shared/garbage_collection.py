"""How often a gateway or a worker looks for cyclic garbage: rarely, and never among what stays for good.

The events of a step are thousands of small objects, so Python's own thresholds mean several searches a step: a sixth of
a gateway's CPU time of a token with 1,000 streams. A search of everything stops all streams for as long as it takes to
walk a vocabulary, or torch: 50 ms every 3 s of a worker that steps with 1,000. Knows nothing of what the process does.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = (
    20_000  # made and not freed before the young are searched; a connection leaves five in circles, asyncio's
)


@contextmanager
def no_searches() -> Iterator[None]:
    """While modules are imported, of which all is kept: a seventh of the time of `import torch`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def search_rarely() -> None:
    """Call once what is kept for good has been loaded: it is left out from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
