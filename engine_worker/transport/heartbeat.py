"""Publishes the newest heartbeat once a second. (Signatures first; bodies follow.)"""

from redis.asyncio import Redis

from shared.messages import WorkerHeartbeat
from shared.redis_keys import RedisKeys


class HeartbeatPublisher:
    def __init__(self, redis: Redis, keys: RedisKeys) -> None: ...

    def offer(self, heartbeat: WorkerHeartbeat) -> None:
        """Called by the engine loop, at least once a second, also when idle: what is not offered is not published."""

    async def run(self) -> None:
        """Owner task: each second publish the heartbeat offered since, if any. Store errors are counted, never raised."""
