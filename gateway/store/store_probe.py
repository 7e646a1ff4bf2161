"""The store is asked: how full its queues are, whether it takes writes, what time the fleet has.

Beside the walks: probes and metrics ask it, and deadlines the time. It knows no request.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.store.store_calls import StoreCalls
from shared.fleet_clock import FleetClock
from shared.redis_keys import GROUP, PRIORITY_CLASSES, RESUMED, RedisKeys


@dataclass(frozen=True, slots=True)
class QueueLoad:
    unfinished: int = 0
    pending: int = 0  # of them, held by a worker

    @property
    def waiting(self) -> int:
        return max(self.unfinished - self.pending, 0)  # the two are not read in one instant


@dataclass(frozen=True, slots=True)
class QueueStats:
    queues: dict[str, QueueLoad] = field(default_factory=dict)  # by class, and "resumed"
    oldest_waiting_seconds: float = 0.0
    dead_letters: int = 0

    @property
    def all(self) -> QueueLoad:
        """The load of all queues together."""
        loads = self.queues.values()
        return QueueLoad(sum(load.unfinished for load in loads), sum(load.pending for load in loads))


async def read_queue_stats(redis: Redis, keys: RedisKeys) -> QueueStats:
    queues: dict[str, QueueLoad] = {}
    oldest_milliseconds: list[int] = []
    for name in (RESUMED, *PRIORITY_CLASSES):
        queue = keys.queue(name)
        group = await _group(redis, queue)
        queues[name] = QueueLoad(await redis.xlen(queue), group["pending"] if group else 0)
        last_delivered: bytes = group["last-delivered-id"] if group else b"0-0"
        first_waiting: Any = await redis.xrange(queue, f"({last_delivered.decode()}", "+", count=1)
        if first_waiting:
            oldest_milliseconds.append(int(first_waiting[0][0].split(b"-")[0]))
    seconds, microseconds = await redis.time()
    now_milliseconds = seconds * 1000 + microseconds // 1000
    oldest = max((now_milliseconds - added for added in oldest_milliseconds), default=0)
    return QueueStats(queues, max(oldest, 0) / 1000, await redis.xlen(keys.dead_letters))


async def _group(redis: Redis, queue: str) -> dict[str, Any] | None:
    try:
        groups: Any = await redis.xinfo_groups(queue)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return None
    return next((group for group in groups if group["name"] == GROUP.encode()), None)


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
