"""Finds dead workers and requeues what they held. (Signatures first; bodies follow.)"""

from redis.asyncio import Redis

from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys


class Reaper:
    def __init__(self, connections: RedisConnections, keys: RedisKeys, *, missed_ticks_until_dead: int = 15) -> None: ...

    async def run(self) -> None:
        """Owner task, in every worker: one tick a second by this process's own clock."""
