"""The store is asked: how full its queues are, whether it takes writes, what time the fleet has.

Beside the walks: probes and metrics ask it, and deadlines the time. It knows no request.
"""

import time
from collections.abc import Callable

from redis.asyncio import Redis

from gateway.store.queue_stats import QueueStats, read_queue_stats
from gateway.store.store_calls import StoreCalls
from shared.fleet_clock import FleetClock
from shared.redis_keys import RedisKeys


class StoreProbe:
    """Each of its questions raises StoreUnavailable."""

    def __init__(
        self,
        redis: Redis,
        keys: RedisKeys,
        calls: StoreCalls,
        fleet_clock: FleetClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._calls = calls
        self._fleet_clock = fleet_clock
        self._clock = clock

    async def queue_stats(self) -> QueueStats:
        return await self._calls.ask(read_queue_stats(self._redis, self._keys))

    async def write_seconds(self) -> float:
        """How long one write took. A PING would still answer when writes are refused."""
        return await self._calls.ask(self._write())

    async def fleet_seconds(self) -> float:
        """Now, on the clock of deadlines."""
        if not self._fleet_clock.is_set:
            await self._calls.ask(self._fleet_clock.tick())
        return self._fleet_clock.now()

    async def _write(self) -> float:
        started = self._clock()
        await self._redis.set(self._keys.write_probe, b"1")
        return self._clock() - started
