"""One life of a worker in the store: its id, its fence, its claims. (Signatures first; bodies follow.)

    incarnation = await register(connections, keys, "w0")
    while True:
        try:
            claimed = await incarnation.requests.claim(free_sequences)          # blocks up to 1 s when block=True
            cancelled_ids = await incarnation.tokens.emit(token_events)         # once per engine step
            await incarnation.tokens.finish(finish_and_error_events)            # after the emit of the same step
        except Fenced:
            drop every sequence; incarnation = await register(connections, keys, "w0", previous=incarnation)
    await incarnation.requests.hand_back()                                      # drain: requeue the rest, no attempt counted
"""

from dataclasses import dataclass

from engine_worker.transport.request_stream import RequestStream
from engine_worker.transport.token_publisher import TokenPublisher
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys


@dataclass(frozen=True, slots=True)
class Incarnation:
    worker_id: str
    requests: RequestStream
    tokens: TokenPublisher


async def register(
    connections: RedisConnections, keys: RedisKeys, base_worker_id: str, previous: Incarnation | None = None
) -> Incarnation:
    """A fresh worker id `BASE.<random>`, its fence, groups and consumer. Waits (with back-off) until the store answers."""
    raise NotImplementedError
