"""Is there room in the store for new requests? Refusing early keeps room for the tokens of those that are running.

A store at its maxmemory refuses every write, so that streams stop which were promised an end. New requests are
therefore refused from CLOSE_AT_RATIO on, and taken again below REOPEN_AT_RATIO: the gap spares clients a flapping door.
"""

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

CLOSE_AT_RATIO = 0.75
REOPEN_AT_RATIO = 0.70
POLL_SECONDS = 1.0


class StoreMemory:
    def __init__(self) -> None:
        self.used_ratio = 0.0  # of maxmemory, as last read; 0 while the store sets no limit
        self.has_room = True

    def update(self, used_bytes: int, max_bytes: int) -> None:
        self.used_ratio = used_bytes / max_bytes if max_bytes > 0 else 0.0
        self.has_room = self.used_ratio < (CLOSE_AT_RATIO if self.has_room else REOPEN_AT_RATIO)

    async def watch(self, redis: Redis) -> None:
        """While the store does not answer, the last reading stands: submitting fails then anyway."""
        while True:
            try:
                memory: Any = await redis.info("memory")
                self.update(int(memory["used_memory"]), int(memory["maxmemory"]))
            except (RedisError, OSError):
                pass
            await asyncio.sleep(POLL_SECONDS)
