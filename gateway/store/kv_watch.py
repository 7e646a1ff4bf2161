"""Snapshots of the workers' KV cache for watchers of the page. Without a watcher no worker makes any.

    async with snapshots_of([watch]) as snapshots:
        async for snapshot in snapshots: ...

A watcher that reads slowly misses snapshots; it never delays the others.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from redis.exceptions import RedisError

from gateway.store.stream_table import DeliveryCounts
from shared.kv_snapshot import WATCH_SECONDS, KVSnapshot
from shared.messages import FormatError, decode_kv_snapshot
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import Message, Subscription
from shared.tasks import run_until_first_ends

logger = logging.getLogger("gateway")

WAITING_SNAPSHOTS = 8  # queued per watcher and model


@asynccontextmanager
async def snapshots_of(watches: Sequence["KVWatch"]) -> AsyncIterator[AsyncIterator[KVSnapshot]]:
    """Return the snapshots of several models as one iterator."""
    queue: asyncio.Queue[KVSnapshot] = asyncio.Queue(WAITING_SNAPSHOTS * len(watches))
    async with AsyncExitStack() as stack:
        for watch in watches:
            await stack.enter_async_context(watch.into(queue))
        yield _drain(queue)


class KVWatch:
    def __init__(self, connections: RedisConnections, keys: RedisKeys, counts: DeliveryCounts) -> None:
        self._connections = connections
        self._keys = keys
        self._counts = counts
        self._watchers: set[asyncio.Queue[KVSnapshot]] = set()
        self._is_watched, self._is_unwatched, self._is_idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Request and receive snapshots while there is a watcher. Runs as an owner task."""
        while True:
            await self._is_watched.wait()
            self._is_idle.clear()
            try:
                await run_until_first_ends(self._ask(), self._listen(), self._until_unwatched())
            finally:
                self._is_idle.set()

    @asynccontextmanager
    async def into(self, queue: asyncio.Queue[KVSnapshot]) -> AsyncIterator[None]:
        self._watchers.add(queue)
        self._is_watched.set()
        try:
            yield
        finally:
            self._watchers.discard(queue)
            if not self._watchers:
                self._is_watched.clear()
                self._is_unwatched.set()
                await self._is_idle.wait()

    async def _until_unwatched(self) -> None:
        while self._watchers:
            self._is_unwatched.clear()
            await self._is_unwatched.wait()

    async def _ask(self) -> None:
        """Set the key that workers look for. It expires by itself, even if this gateway is killed."""
        while True:
            try:
                await self._connections.commands.set(self._keys.kv_watch, b"1", ex=WATCH_SECONDS)
            except (RedisError, OSError) as error:
                logger.warning("KV watch: request failed: %s", error)
            await asyncio.sleep(WATCH_SECONDS / 2)

    async def _listen(self) -> None:
        subscription = Subscription(self._connections.subscriber, [self._keys.kv_channel])
        try:
            while True:
                message = await subscription.get(timeout_seconds=1.0)
                if isinstance(message, Message):
                    self._deliver(message.data)
        finally:
            await subscription.aclose()

    def _deliver(self, data: bytes) -> None:
        try:
            snapshot = decode_kv_snapshot(data)
        except FormatError as error:
            self._counts.num_bad_messages += 1
            logger.warning("KV snapshot: dropped: %s", error)
            return
        except Exception:
            self._counts.num_message_errors += 1
            logger.exception("KV snapshot: failed")
            return
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(snapshot)


async def _drain(queue: "asyncio.Queue[KVSnapshot]") -> AsyncIterator[KVSnapshot]:
    while True:
        yield await queue.get()
