"""Receives the control messages of one worker incarnation.

    REQUEST           the request was cancelled
    REQUEST GATEWAY   a gateway attached to the request
    (empty)           entries wait in the queue

Messages may be lost. EMIT reports a cancellation anyway; a message is faster, which matters for requests that produce
no tokens yet, such as a long prefill. A gateway that receives no events attaches again. A worker also looks at the
queue once a second.
"""

from collections.abc import Callable

from redis.asyncio import Redis

from engine_worker.transport.incarnation import Incarnation
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import Message, Subscription


async def listen(
    connections: RedisConnections, keys: RedisKeys, incarnation: Incarnation, on_cancel: Callable[[str], None]
) -> None:
    """Receive the messages of an incarnation until cancelled; `on_cancel` is called with the id of a request."""
    messages = ControlMessages(
        connections.subscriber,
        keys,
        on_cancel,
        on_attach=incarnation.claims.attach,
        on_wake=incarnation.requests.wakes.wake,
    )
    await messages.run(incarnation.worker_id)


class ControlMessages:
    def __init__(
        self,
        subscriber: Redis,
        keys: RedisKeys,
        on_cancel: Callable[[str], None],
        *,
        on_attach: Callable[[str, str], None] = lambda request_id, gateway_id: None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._subscriber = subscriber
        self._keys = keys
        self._on_cancel = on_cancel
        self._on_attach = on_attach
        self._on_wake = on_wake

    async def run(self, worker_id: str) -> None:
        """Call back for each message, until cancelled. Start one task per incarnation."""
        subscription = Subscription(self._subscriber, [self._keys.control_channel(worker_id)])
        try:
            while True:
                message = await subscription.get(timeout_seconds=1.0)
                if isinstance(message, Message):
                    self._handle(message.data.decode(errors="replace"))
        finally:
            await subscription.aclose()

    def _handle(self, text: str) -> None:
        request_id, _, gateway_id = text.partition(" ")
        if gateway_id:
            self._on_attach(request_id, gateway_id)
        elif request_id:
            self._on_cancel(request_id)
        else:
            self._on_wake()
