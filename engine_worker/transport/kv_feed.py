"""Publishes snapshots of the worker's KV cache, about once a second, while a gateway reports viewers.

Without viewers it costs one EXISTS per second. Lost snapshots are not repeated, because each one is complete.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.kv_snapshot import SNAPSHOT_SECONDS, KVMove, KVRequest, KVSnapshot, KVTable
from shared.messages import encode
from shared.redis_keys import RedisKeys
from shared.ticks import next_tick

UNKNOWN = "?"  # the tenant of a request that ended before the first snapshot; not a valid key name

logger = logging.getLogger("worker")


class KVSource(Protocol):
    """The loaded engine."""

    async def kv_view(self) -> dict[str, Any]: ...

    async def kv_events(self, since: int) -> dict[str, Any]: ...


class KVFeed:
    def __init__(
        self,
        redis: Redis,
        keys: RedisKeys,
        source: Callable[[], KVSource | None],
        worker_id: Callable[[], str],
        tenants: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Create the feed.

        Args:
            redis: The connection to publish on.
            keys: The names of channels.
            source: Returns the engine; None while it is not loaded.
            worker_id: Returns the id of the current incarnation.
            tenants: Returns the tenant of each held request, by id.
        """
        self._redis = redis
        self._keys = keys
        self._source = source
        self._worker_id = worker_id
        self._tenants = tenants
        self._known: Mapping[str, str] = {}  # tenants at the previous snapshot, for moves of requests that ended since
        self._last_event = 0

    async def run(self) -> None:
        """Publish snapshots until cancelled. Store errors are logged, never raised."""
        while True:
            await next_tick(SNAPSHOT_SECONDS)
            try:
                await self.publish_if_watched()
            except (RedisError, OSError) as error:
                logger.debug("KV snapshot: not sent: %s", error)

    async def publish_if_watched(self) -> None:
        """Publish a snapshot if a gateway reports viewers."""
        source = self._source()
        if source is None or not await self._redis.exists(self._keys.kv_watch):
            return
        view, moves = await source.kv_view(), await source.kv_events(self._last_event)
        self._last_event = moves["last"]
        tenants = self._tenants()
        snapshot = _snapshot(self._worker_id(), view, moves["events"], {**self._known, **tenants})
        self._known = tenants
        await self._redis.publish(self._keys.kv_channel, encode(snapshot))


def _snapshot(
    worker_id: str, view: dict[str, Any], events: list[dict[str, Any]], tenants: Mapping[str, str]
) -> KVSnapshot:
    return KVSnapshot(
        worker=worker_id,
        block_size=view["block_size_tokens"],
        states=view["device"]["states"],
        requests=[_request(sequence, tenants) for sequence in view["sequences"]],
        events=[_move(event, tenants) for event in events],
        host_states=view["host"]["states"] if view["host"] else "",
        time_seconds=time.time(),
    )


def _request(sequence: dict[str, Any], tenants: Mapping[str, str]) -> KVRequest:
    return KVRequest(
        id=f"{sequence['request_id'][:12]}#{sequence['choice']}",  # request ids have 32 digits
        state=sequence["status"],
        num_tokens=sequence["num_tokens"],
        num_computed_tokens=sequence["num_computed_tokens"],
        blocks=sequence["block_table"],
        host_blocks=sequence["host_block_table"],
        tables=[KVTable(**{name: table[name] for name in KVTable.__struct_fields__}) for table in sequence["tables"]],
        tenant=tenants.get(sequence["request_id"], UNKNOWN),
    )


def _move(event: dict[str, Any], tenants: Mapping[str, str]) -> KVMove:
    fields = {name: event[name] for name in KVMove.__struct_fields__ if name != "tenant"}
    return KVMove(**fields, tenant=tenants.get(event["request_id"], UNKNOWN))
