"""The gateway's only Redis code: requests in, ordered token streams out. (Signatures first; bodies follow.)

    client = InferenceClient(connect(url), RedisKeys("model name"), gateway_id)
    await client.start()
    stream = await client.submit(request)          # the HTTP 200 goes out only after this returned
    async for event in stream: ...                 # TokenEvents in order, each index once, then one FinishEvent|ErrorEvent
    await client.cancel(request.request_id)        # the reader of the stream sees FinishEvent(CANCELLED)
    await client.close()
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from shared.messages import GenerationRequest, StreamEvent, WorkerHeartbeat
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys


class InferenceError(Exception):
    """A request that was not accepted."""


class QueueFull(InferenceError):
    """The queue of its class is at its cap (answer 429 with Retry-After)."""


class StoreUnavailable(InferenceError):
    """Redis does not answer or refuses writes (answer 503)."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    heartbeat: WorkerHeartbeat
    seconds_since_seen: float  # by this process's monotonic clock


@dataclass(frozen=True, slots=True)
class QueueStats:
    depth: int  # accepted and not finished: waiting + pending
    pending: int  # claimed by a worker
    waiting: int
    oldest_waiting_seconds: float


class ResponseStream(AsyncIterator[StreamEvent]):
    """The events of one request; tokens that arrived since the last read come joined in one TokenEvent."""

    request_id: str

    async def __anext__(self) -> StreamEvent:
        raise NotImplementedError


class InferenceClient:
    def __init__(
        self, connections: RedisConnections, keys: RedisKeys, gateway_id: str, *, max_queued_requests: int = 1024
    ) -> None:
        """One client per served model; `max_queued_requests` is the cap of each priority class."""

    async def start(self) -> None:
        """Start the owner tasks; returns at once, also while the store is away."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def submit(self, request: GenerationRequest, *, owner_key_hash: str = "") -> ResponseStream:
        """Store the request durably. Raises QueueFull or StoreUnavailable; safe to cancel (the request is withdrawn)."""
        raise NotImplementedError

    def generate(self, request: GenerationRequest, *, owner_key_hash: str = "") -> AsyncIterator[StreamEvent]:
        """submit + iterate, and cancel when the reader leaves early."""
        raise NotImplementedError

    async def cancel(self, request_id: str) -> None:
        """Withdraw a request. Never raises for the store: it is repeated in the background until the store answers."""
        raise NotImplementedError

    @property
    def fleet(self) -> list[WorkerStatus]:
        """Workers (and "supervisor") heard within the last 60 s, by worker id."""
        raise NotImplementedError

    async def queue_stats(self) -> QueueStats:
        """Raises StoreUnavailable."""
        raise NotImplementedError

    async def write_probe(self) -> float:
        """Seconds that one write took; raises StoreUnavailable. A PING would still answer when writes are refused."""
        raise NotImplementedError
