"""An exclusive file lock that the kernel releases when its holder exits."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

POLL_SECONDS = 0.05


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """Hold `path` exclusively; waiting polls, so that it can be cancelled."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, mode=0o600), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_SECONDS)
        yield
