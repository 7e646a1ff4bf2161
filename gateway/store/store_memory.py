"""Is there room in the store for new requests? Refusing early keeps room for the tokens of those that are running.

A store at its maxmemory refuses every write, so that streams stop which were promised an end. New requests are
therefore refused from CLOSE_AT_RATIO on, and taken again below REOPEN_AT_RATIO: the gap spares clients a flapping door.
A store without a maxmemory grows until its machine ends it, with all that was accepted since its file was written: the
machine's memory is its limit then, and that there is no nearer one is warned of.

A chat's way in asks it before anything is encoded. It knows no request.
"""

import asyncio
import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

CLOSE_AT_RATIO = 0.75
REOPEN_AT_RATIO = 0.70
POLL_SECONDS = 1.0

logger = logging.getLogger("gateway")


class StoreMemory:
    def __init__(self) -> None:
        self.used_ratio = 0.0  # of its maxmemory, or of its machine's, as last read; 0 before
        self.max_bytes = 0  # that those are; 0 before, or while nobody says
        self.has_room = True
        self._is_warned = False

    def update(self, used_bytes: int, max_bytes: int, system_bytes: int = 0) -> None:
        """`max_bytes`: maxmemory, 0 for none; `system_bytes`: of its machine, 0 if it does not say."""
        if not max_bytes:
            self._warn_once(system_bytes)
        limit_bytes = max_bytes or system_bytes
        self.max_bytes = limit_bytes
        self.used_ratio = used_bytes / limit_bytes if limit_bytes > 0 else 0.0
        self.has_room = self.used_ratio < (CLOSE_AT_RATIO if self.has_room else REOPEN_AT_RATIO)

    async def watch(self, redis: Redis) -> None:
        """While the store does not answer, the last reading stands: submitting fails then anyway."""
        while True:
            try:
                memory: Any = await redis.info("memory")
                system_bytes = int(memory.get("total_system_memory", 0))
                self.update(int(memory["used_memory"]), int(memory["maxmemory"]), system_bytes)
            except (RedisError, OSError):
                pass
            await asyncio.sleep(POLL_SECONDS)

    def _warn_once(self, system_bytes: int) -> None:
        if not self._is_warned:
            self._is_warned = True
            machine = f"{CLOSE_AT_RATIO:.0%} of its machine's {system_bytes / 2**30:.1f} GiB"
            closes = f"closes at {machine}" if system_bytes else "never closes"
            logger.warning("the store has no maxmemory: admission %s; give it one", closes)
