"""Listens for cancel hints to one worker incarnation. (Signatures first; bodies follow.)"""

from collections.abc import Callable

from redis.asyncio import Redis

from shared.redis_keys import RedisKeys


class CancelHints:
    def __init__(self, subscriber: Redis, keys: RedisKeys, on_cancel: Callable[[str], None]) -> None: ...

    async def run(self, worker_id: str) -> None:
        """Owner task: calls `on_cancel(request_id)` for each hint. Hints may be lost; emit() reports cancels anyway."""
