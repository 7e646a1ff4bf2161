"""Receives hints for one worker incarnation: `REQUEST` was cancelled, or `REQUEST GATEWAY` attached to a request.

Hints may be lost. EMIT reports a cancellation anyway; a hint is faster, which matters for requests that produce no
tokens yet, such as a long prefill. A gateway that receives no events attaches again.
"""

from collections.abc import Callable

from redis.asyncio import Redis

from shared.redis_keys import RedisKeys
from shared.subscription import Message, Subscription


class CancelHints:
    def __init__(
        self,
        subscriber: Redis,
        keys: RedisKeys,
        on_cancel: Callable[[str], None],
        on_attach: Callable[[str, str], None] = lambda request_id, gateway_id: None,
    ) -> None:
        self._subscriber = subscriber
        self._keys = keys
        self._on_cancel = on_cancel
        self._on_attach = on_attach

    async def run(self, worker_id: str) -> None:
        """Call back for each hint, until cancelled. Start one task per incarnation."""
        subscription = Subscription(self._subscriber, [self._keys.control_channel(worker_id)])
        try:
            while True:
                message = await subscription.get(timeout_seconds=1.0)
                if isinstance(message, Message):
                    self._handle_message(message.data.decode(errors="replace"))
        finally:
            await subscription.aclose()

    def _handle_message(self, hint: str) -> None:
        request_id, _, gateway_id = hint.partition(" ")
        if gateway_id:
            self._on_attach(request_id, gateway_id)
        else:
            self._on_cancel(request_id)
