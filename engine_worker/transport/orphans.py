"""Ends requests whose gateway is gone and to which no other gateway attached, and so frees their KV and queue places.

A gateway is alive while it subscribes to its own channel; the store closes the subscription of a killed one. The time
since then is counted in ticks of this process, so a paused observer ends nothing. Each tick reads one page of the
queues, which contain every unfinished request. If a request was ended by mistake, because its gateway was only cut off,
that gateway submits it again; a request with a stored answer is requeued when a former gateway attaches to it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import PROTOCOL_VERSION, EventBatch, FinishEvent, FinishReason, Usage, encode
from shared.new_requests import GRACE_SECONDS
from shared.redis_scripts import RedisScripts

PAGE_ENTRIES = 256  # per queue and tick: about 1 ms of the server's time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    request_id: str
    gateway_id: str
    grace_seconds: float
    priority_class: str


class Orphans:
    def __init__(self, scripts: RedisScripts, tick_seconds: float, faults: FaultCounts | None = None) -> None:
        self._scripts = scripts
        self._tick_seconds = tick_seconds
        self._missed: dict[str, int] = {}  # consecutive ticks, by gateway that is gone
        self._cursors: dict[str, str] = {}  # the last entry read, by queue that is not read to its end
        self._seen: set[str] = set()  # gateways in this pass over the queues
        self._last_seen: set[str] = set()  # gateways in the previous pass
        self.faults = faults or FaultCounts()

    async def tick(self) -> None:
        """Read one page, and end its orphaned requests. Raises the store's errors."""
        requests = await self._next_page()
        self._seen.update(request.gateway_id for request in requests)
        await self._count({*self._seen, *self._last_seen})
        for request in requests:
            gone_seconds = self._missed.get(request.gateway_id, 0) * self._tick_seconds
            if gone_seconds >= request.grace_seconds:
                await self._end(request)
        if not self._cursors:
            self._seen, self._last_seen = set(), self._seen

    async def _count(self, gateway_ids: Iterable[str]) -> None:
        known = sorted(gateway_ids)
        if not known:
            self._missed.clear()
            return
        channels = [self._scripts.keys.gateway_channel(gateway_id) for gateway_id in known]
        replies: Any = await self._scripts.redis.pubsub_numsub(*channels)
        self._missed = {
            gateway_id: self._missed.get(gateway_id, -1) + 1  # starts at 0, because the first tick is partial
            for gateway_id, (_, num_subscribers) in zip(known, replies, strict=True)
            if not num_subscribers
        }

    async def _end(self, request: _Waiting) -> None:
        usage = Usage(prompt_tokens=0, completion_tokens=0)
        event = FinishEvent(request.request_id, FinishReason.CANCELLED, usage)
        blob = encode(EventBatch(PROTOCOL_VERSION, "reaper", 0, [event]))
        ended = await self._scripts.cancel(
            request.request_id,
            request.priority_class,
            gone_gateway_id=request.gateway_id,
            event=encode(event),
            blob=blob,
        )
        if ended:
            self.faults.num_ended += 1
            logger.warning("request %s: ended: its gateway %s is gone", request.request_id, request.gateway_id)

    async def _next_page(self) -> list[_Waiting]:
        redis, keys = self._scripts.redis, self._scripts.keys
        starts = {queue: f"({after}" for queue, after in self._cursors.items()} or dict.fromkeys(keys.queues, "-")
        async with redis.pipeline(transaction=False) as pipeline:
            for queue, start in starts.items():
                pipeline.xrange(queue, start, "+", count=PAGE_ENTRIES)
            pages = await pipeline.execute()
        self._cursors = {
            queue: page[-1][0].decode() for queue, page in zip(starts, pages, strict=True) if len(page) == PAGE_ENTRIES
        }
        request_ids = [fields[b"r"].decode() for page in pages for _, fields in page if fields]
        if not request_ids:
            return []
        async with redis.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hmget(keys.request(request_id), ["gateway", "grace", "class"])
            replies = await pipeline.execute(raise_on_error=False)
        found = [_waiting(request_id, reply) for request_id, reply in zip(request_ids, replies, strict=True)]
        return [request for request in found if request is not None]


def _waiting(request_id: str, reply: Any) -> _Waiting | None:
    """Return None if it was cancelled, has the wrong type, or has no gateway (a retried dead letter)."""
    if isinstance(reply, Exception) or not reply[0] or not reply[2]:
        return None
    gateway_id, grace, priority_class = reply
    return _Waiting(request_id, gateway_id.decode(), float(grace or GRACE_SECONDS), priority_class.decode())
