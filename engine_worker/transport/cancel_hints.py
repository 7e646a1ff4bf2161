"""Listens for cancel hints to one worker incarnation.

Hints may be lost: they only make a cancel faster than the next EMIT, which reports it anyway. They matter for requests
that make no tokens yet, such as a long prefill.
"""

from collections.abc import Callable

from redis.asyncio import Redis

from shared.redis_keys import RedisKeys
from shared.subscription import Message, Subscription


class CancelHints:
    def __init__(self, subscriber: Redis, keys: RedisKeys, on_cancel: Callable[[str], None]) -> None:
        self._subscriber = subscriber
        self._keys = keys
        self._on_cancel = on_cancel

    async def run(self, worker_id: str) -> None:
        """Owner task: calls `on_cancel(request_id)` for each hint. Start it anew for each incarnation."""
        subscription = Subscription(self._subscriber, [self._keys.control_channel(worker_id)])
        try:
            while True:
                message = await subscription.get(timeout_seconds=1.0)
                if isinstance(message, Message):
                    self._on_cancel(message.data.decode(errors="replace"))
        finally:
            await subscription.aclose()
