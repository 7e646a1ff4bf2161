"""Ends requests whose gateway is gone and to which no other gateway attached, and so frees their KV and queue places.

A gateway is alive while it subscribes to its own channel; the store closes the subscription of a killed one. The time
since then is counted in ticks of this process, so a paused observer ends nothing. Each tick reads some pages of the
queues, which contain every unfinished request. If a request was ended by mistake, because its gateway was only cut off,
that gateway submits it again; a request with a stored answer is requeued when a former gateway attaches to it.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from engine_worker.transport.fault_counts import FaultCounts
from shared.messages import PROTOCOL_VERSION, EventBatch, FinishEvent, FinishReason, Usage, encode
from shared.redis_scripts import GoneRequest, RedisScripts

PAGE_ENTRIES = 64  # 2.3 ms of the store, which answers others after each
PAGES_PER_TICK = 64  # at most: 100,000 requests are read in 25 s
ENDS_AT_ONCE = 32  # one round trip each would take longer than reading 100,000 requests
PASS_TICKS = 8  # fewer requests are read slower, within this time

logger = logging.getLogger(__name__)


class Orphans:
    def __init__(self, scripts: RedisScripts, tick_seconds: float, faults: FaultCounts | None = None) -> None:
        self._scripts = scripts
        self._tick_seconds = tick_seconds
        self._missed: dict[str, int] = {}  # consecutive ticks, by gateway that is gone
        self._unread: list[tuple[str, str]] = []  # queues of this pass, each with the entry before its next page
        self._seen: set[str] = set()  # gateways without listeners in this pass over the queues
        self._last_seen: set[str] = set()  # in the previous pass
        self.faults = faults or FaultCounts()

    def forget_all(self) -> None:
        """Restart every count, because another worker observes."""
        self._missed.clear()
        self._unread, self._seen, self._last_seen = [], set(), set()

    async def tick(self) -> None:
        """Read the next pages, and end their orphaned requests. Raises the store's errors."""
        requests = await self._next_pages()
        self._seen.update(request.gateway_id for request in requests)
        await self._count({*self._seen, *self._last_seen})
        orphans = [request for request in requests if self._is_orphaned(request)]
        for start in range(0, len(orphans), ENDS_AT_ONCE):
            await asyncio.gather(*map(self._end, orphans[start : start + ENDS_AT_ONCE]))
        if not self._unread:
            self._seen, self._last_seen = set(), self._seen

    def _is_orphaned(self, request: GoneRequest) -> bool:
        return self._missed.get(request.gateway_id, 0) * self._tick_seconds >= request.grace_seconds

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

    async def _end(self, request: GoneRequest) -> None:
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

    async def _next_pages(self) -> list[GoneRequest]:
        self._unread = self._unread or [(queue, "") for queue in self._scripts.keys.queues]
        requests: list[GoneRequest] = []
        num_full, num_wanted = 0, 1
        while self._unread and num_full < num_wanted:
            # At once, because an idle worker should wake seldom.
            pages = await asyncio.gather(
                *(self._scripts.gone(queue, after, PAGE_ENTRIES) for queue, after in self._unread)
            )
            queues = [queue for queue, _ in self._unread]
            self._unread = [
                (queue, page.last_entry) for queue, page in zip(queues, pages, strict=True) if page.last_entry
            ]
            num_full += len(self._unread)
            num_entries = sum(page.queue_length for page in pages)
            num_wanted = min(PAGES_PER_TICK, num_entries // (PAGE_ENTRIES * PASS_TICKS) + 1)
            requests += [request for page in pages for request in page.requests]
        return requests
