"""Snapshots of the workers' KV memory for those who watch the page. While nobody does, no worker makes any.

    async with snapshots_of([watch]) as snapshots:
        async for snapshot in snapshots: ...

A watcher that reads slowly misses snapshots; it never delays the others.

Beside the walks: routes/kv.py reads it. It knows no key and no block.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from redis.exceptions import RedisError

from shared.kv_snapshot import WATCH_SECONDS, KVSnapshot
from shared.messages import FormatError, decode_kv_snapshot
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.subscription import Message, Subscription
from shared.tasks import cancel_and_wait

logger = logging.getLogger("gateway")

WAITING_SNAPSHOTS = 8  # of all workers of a model together


@asynccontextmanager
async def snapshots_of(watches: Sequence["KVWatch"]) -> AsyncIterator[AsyncIterator[KVSnapshot]]:
    """The watch of several models as one."""
    queue: asyncio.Queue[KVSnapshot] = asyncio.Queue(WAITING_SNAPSHOTS * len(watches))
    async with AsyncExitStack() as stack:
        for watch in watches:
            await stack.enter_async_context(watch.into(queue))
        yield _drain(queue)


class KVWatch:
    def __init__(self, connections: RedisConnections, keys: RedisKeys) -> None:
        self._connections = connections
        self._keys = keys
        self._watchers: set[asyncio.Queue[KVSnapshot]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def into(self, queue: asyncio.Queue[KVSnapshot]) -> AsyncIterator[None]:
        self._watchers.add(queue)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._listen())]
        try:
            yield
        finally:
            self._watchers.discard(queue)
            if not self._watchers:
                await self.aclose()

    async def aclose(self) -> None:
        tasks, self._tasks = self._tasks, []
        await cancel_and_wait(tasks)

    async def _ask(self) -> None:
        """The key that workers look for; it ends by itself, also when this gateway is killed."""
        while True:
            try:
                await self._connections.commands.set(self._keys.kv_watch, b"1", ex=WATCH_SECONDS)
            except (RedisError, OSError) as error:
                logger.warning("cannot ask for KV snapshots: %s", error)
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
            logger.warning("dropped a KV snapshot: %s", error)
            return
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(snapshot)


async def _drain(queue: "asyncio.Queue[KVSnapshot]") -> AsyncIterator[KVSnapshot]:
    while True:
        yield await queue.get()
