"""Waits until a replica of the store has what was written (--durable-accept replica).

Replication is one stream, so a WAIT after any later write covers all earlier ones; it blocks only its own connection.
Requests that wait at the same time share one. WAIT is no consensus: a replica that is promoted has the write only if it
is the one that confirmed it, or if the store has one replica. Source: https://valkey.io/commands/wait/.
"""

import asyncio

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.store.store_calls import NotReplicated, StoreUnavailable
from shared.redis_keys import RedisKeys


class Replication:
    def __init__(self, redis: Redis, keys: RedisKeys, timeout_seconds: float) -> None:
        """Create it; `redis` is a client whose connections may block, and `timeout_seconds` the limit of each wait."""
        self._redis = redis
        self._keys = keys
        self._timeout_seconds = timeout_seconds
        self._now: asyncio.Task[None] | None = None  # has been sent
        self._next: asyncio.Task[None] | None = None  # begins when that one has ended

    async def confirm(self) -> None:
        """Return when a replica has every write that the store has answered so far.

        Raises:
            NotReplicated: If no replica confirms it in time.
            StoreUnavailable: If the store does not answer.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._now))
        await asyncio.shield(self._next)

    async def _after(self, earlier: "asyncio.Task[None] | None") -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._now, self._next = self._next, None
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(self._keys.write_probe, b"1")
                pipeline.wait(1, round(self._timeout_seconds * 1000))
                _, num_replicas = await pipeline.execute()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error
        if num_replicas < 1:
            raise NotReplicated(f"no replica confirmed the request within {self._timeout_seconds:g} s")
