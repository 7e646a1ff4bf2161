"""Publishes the worker's heartbeats: each one, or only the newest if the store is slow.

It uses PUBLISH instead of a key with a TTL, because PUBLISH works when the store is out of memory, and no server clock
decides which worker is alive. Only heartbeats that the engine loop has set are published, so a hung loop falls silent.
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
        """Set the heartbeat to publish next. The event loop calls it every BEAT_SECONDS, also when idle or loading."""
        self._latest = heartbeat
        self._has_new.set()

    async def run(self) -> None:
        """Publish heartbeats until cancelled. Store errors are counted, never raised."""
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            await self.beat()

    async def beat(self) -> None:
        """Publish the latest heartbeat, if it was not published yet."""
        heartbeat, self._latest = self._latest, None
        if heartbeat is None:
            return
        try:
            await self._redis.publish(self._channel, encode(heartbeat))
        except (RedisError, OSError) as error:
            self.faults.num_failures += 1
            logger.warning("heartbeat: not sent: %s", error)
