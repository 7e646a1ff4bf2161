"""The atomic scripts, called with types. (Signatures first; bodies follow.)"""

from redis.asyncio import Redis

from shared.redis_keys import RedisKeys


class Fenced(Exception):
    """The store no longer counts this worker incarnation as alive: drop every sequence and register anew."""


async def reap_workers_with_prefix(redis: Redis, keys: RedisKeys, base_worker_id: str) -> list[str]:
    """Requeue at once whatever the dead incarnations of `base_worker_id` held; call before its successor starts."""
    raise NotImplementedError
