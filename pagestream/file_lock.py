"""One process at a time: a lock that the kernel drops with its holder.

Beside the walks: downloads, conversions and run-batch hold one. It does not know what is guarded.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

POLL_SECONDS = 0.05


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """Hold `path` exclusively. Polled, so that the waiting can be cancelled."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, mode=0o600), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_SECONDS)
        yield
