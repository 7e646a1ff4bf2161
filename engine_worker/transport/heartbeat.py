"""Publishes each heartbeat that is offered, or the newest where the store is slow; one is offered each second, and one
more as soon as a worker is ready.

A PUBLISH and not a key with a TTL: it is still allowed when the store is out of memory, and no clock of the server
decides who is alive. Only what the engine loop has offered since the last beat is published: a hung loop falls silent.

It stands beside every walk: gateways and other workers hear it, and miss it in a takeover. It does not know what the
heartbeat says.
"""

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import WorkerHeartbeat, encode
from shared.redis_keys import RedisKeys

BEAT_SECONDS = 1.0

logger = logging.getLogger(__name__)


class HeartbeatPublisher:
    def __init__(
        self,
        redis: Redis,
        keys: RedisKeys,
        *,
        faults: FaultCounts | None = None,
    ) -> None:
        self._redis = redis
        self._channel = keys.heartbeat_channel
        self._latest: WorkerHeartbeat | None = None
        self._has_new = asyncio.Event()
        self.faults = faults or FaultCounts()

    def set_latest(self, heartbeat: WorkerHeartbeat) -> None:
        """Called by the engine loop every BEAT_SECONDS, also when idle and while loading."""
        self._latest = heartbeat
        self._has_new.set()

    async def run(self) -> None:
        """Owner task. Store errors are counted, never raised."""
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            await self.beat()

    async def beat(self) -> None:
        heartbeat, self._latest = self._latest, None
        if heartbeat is None:
            return
        try:
            await self._redis.publish(self._channel, encode(heartbeat))
        except (RedisError, OSError) as error:
            self.faults.num_failures += 1
            logger.warning("heartbeat not sent: %s", error)
