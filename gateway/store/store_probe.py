"""Reads the state of the store: memory and queue usage, whether it takes writes, and the fleet's clock.

Admission uses the memory state before a prompt is encoded; probes, metrics, and deadlines use the rest.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gateway.store.store_calls import StoreCalls, StoreUnavailable
from shared.fleet_clock import FleetClock
from shared.redis_keys import GROUP, QUEUE_NAMES, RedisKeys
from shared.ticks import next_tick

logger = logging.getLogger("gateway")

CLOSE_AT_RATIO = 0.75
REOPEN_AT_RATIO = 0.70
POLL_SECONDS = 1.0
PROBE_SECONDS = 2.0  # load balancers often wait no longer; a command waits 5 s
LOOK_SECONDS = 5.0  # a missing date says the same as a young one
YOUNG_SECONDS = 10.0  # gateways send the requests of a lost store again within 3 s


class StoreMemory:
    """Whether the store has room for new requests.

    A store at its maxmemory refuses every write, which would stop accepted streams. New requests are therefore refused
    from CLOSE_AT_RATIO on and taken again below REOPEN_AT_RATIO; the gap prevents flapping. A store without maxmemory
    grows until the kernel kills it, and loses everything since its last save: the machine's memory is then the limit,
    and a warning is logged.
    """

    def __init__(self) -> None:
        self.used_ratio = 0.0  # of maxmemory, or of the machine's memory, as last read; 0 before
        self.max_bytes = 0  # maxmemory, or the machine's memory; 0 while unknown
        self.has_room = True
        self._is_warned = False

    def update(self, used_bytes: int, max_bytes: int, system_bytes: int = 0) -> None:
        """Update from INFO memory; `max_bytes` is maxmemory (0: none), `system_bytes` the machine's (0: unknown)."""
        if not max_bytes:
            self._warn_once(system_bytes)
        limit_bytes = max_bytes or system_bytes
        self.max_bytes = limit_bytes
        self.used_ratio = used_bytes / limit_bytes if limit_bytes > 0 else 0.0
        self.has_room = self.used_ratio < (CLOSE_AT_RATIO if self.has_room else REOPEN_AT_RATIO)

    async def watch(self, redis: Redis) -> None:
        """Poll the store. While it does not answer, the last values stay: submissions fail then anyway."""
        while True:
            try:
                memory: Any = await redis.info("memory")
                system_bytes = int(memory.get("total_system_memory", 0))
                self.update(int(memory["used_memory"]), int(memory["maxmemory"]), system_bytes)
            except (RedisError, OSError):
                pass
            await next_tick(POLL_SECONDS)

    def _warn_once(self, system_bytes: int) -> None:
        if not self._is_warned:
            self._is_warned = True
            machine = f"{CLOSE_AT_RATIO:.0%} of the machine's {system_bytes / 2**30:.1f} GiB"
            closes = f"closes at {machine}" if system_bytes else "never closes"
            logger.warning("store: maxmemory is not set: admission %s; set maxmemory", closes)


class StoreHistory:
    """What the store says of the past: whether workers have served this model, and since when it has its data.

    If they have, one may come back, for which requests can wait. A store that has lost its data gets the running
    requests again from their gateways within seconds; until then an unknown id may be one of these.
    """

    def __init__(self, redis: Redis, keys: RedisKeys, calls: StoreCalls, fleet_clock: FleetClock) -> None:
        self.was_served = False
        self._redis = redis
        self._keys = keys
        self._calls = calls
        self._fleet_clock = fleet_clock

    async def watch(self) -> None:
        """Look now and then. Runs as an owner task."""
        while True:
            with suppress(RedisError, OSError):
                await self.look()
            await next_tick(LOOK_SECONDS)

    async def look(self) -> None:
        """Look for the model's identity, and date a store that has no date. Raises the store's errors."""
        if self._fleet_clock.is_set:
            await self._redis.set(self._keys.born, round(self._fleet_clock.now() * 1000), nx=True)
        if not self.was_served:
            self.was_served = bool(await self._redis.exists(self._keys.model))

    async def is_young(self) -> bool:
        """Return whether the store may have lost its data in the last seconds. Raises StoreUnavailable."""
        born = await self._calls.ask(self._read_date())
        return born is None or self._fleet_clock.now() - int(born) / 1000 < YOUNG_SECONDS

    async def _read_date(self) -> Any:
        return await self._redis.get(self._keys.born)


@dataclass(frozen=True, slots=True)
class QueueLoad:
    unfinished: int = 0
    pending: int = 0  # of these, claimed by a worker
    oldest_seconds: float = 0.0  # age of the oldest that waits

    @property
    def waiting(self) -> int:
        return max(self.unfinished - self.pending, 0)  # the two are not read at the same instant


@dataclass(frozen=True, slots=True)
class QueueStats:
    queues: dict[str, QueueLoad] = field(default_factory=dict)  # by class, plus "resumed" and "newer"
    dead_letters: int = 0

    @property
    def all(self) -> QueueLoad:
        """The load of all queues together."""
        loads = self.queues.values()
        oldest_seconds = max((load.oldest_seconds for load in loads), default=0.0)
        return QueueLoad(sum(load.unfinished for load in loads), sum(load.pending for load in loads), oldest_seconds)


async def read_queue_stats(redis: Redis, keys: RedisKeys) -> QueueStats:
    queues: dict[str, QueueLoad] = {}
    seconds, microseconds = await redis.time()
    now_milliseconds = seconds * 1000 + microseconds // 1000
    for name in QUEUE_NAMES:
        queue = keys.queue(name)
        group = await _group(redis, queue)
        last_delivered: bytes = group["last-delivered-id"] if group else b"0-0"
        first_waiting: Any = await redis.xrange(queue, f"({last_delivered.decode()}", "+", count=1)
        added = int(first_waiting[0][0].split(b"-")[0]) if first_waiting else now_milliseconds
        oldest_seconds = max(now_milliseconds - added, 0) / 1000
        queues[name] = QueueLoad(await redis.xlen(queue), group["pending"] if group else 0, oldest_seconds)
    return QueueStats(queues, await redis.xlen(keys.dead_letters))


async def num_waiting(redis: Redis, queue: str) -> int:
    """Return the number of requests of a queue that no worker has read."""
    group = await _group(redis, queue)
    return QueueLoad(await redis.xlen(queue), group["pending"] if group else 0).waiting


async def _group(redis: Redis, queue: str) -> dict[str, Any] | None:
    try:
        groups: Any = await redis.xinfo_groups(queue)
    except ResponseError as error:
        if "no such key" not in str(error):
            raise
        return None
    return next((group for group in groups if group["name"] == GROUP.encode()), None)


class StoreProbe:
    """Queries of the store; each raises StoreUnavailable."""

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
        """Return the duration of one write. A PING would succeed even if writes are refused.

        Raises:
            StoreUnavailable: If it fails, or takes longer than a probe waits.
        """
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return await self._calls.ask(self._write())
        except TimeoutError:
            raise StoreUnavailable(f"no reply in {PROBE_SECONDS:g} s") from None

    async def fleet_seconds(self) -> float:
        """Return the current time on the fleet's clock, which deadlines use, in seconds."""
        if not self._fleet_clock.is_set:
            await self._calls.ask(self._fleet_clock.tick())
        return self._fleet_clock.now()

    async def _write(self) -> float:
        started = self._clock()
        await self._redis.set(self._keys.write_probe, b"1")
        return self._clock() - started
