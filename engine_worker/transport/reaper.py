"""Finds dead workers and requeues their requests, and ends orphaned requests (orphans.py). It runs in every worker.

Time is counted in ticks of this process: a worker without a heartbeat for 15 ticks is dead. A late tick counts as one,
so a paused observer reaps no worker. A tick in which the observer received nothing, not even the reply to its ping,
does not count. A consumer without a fence is a zombie, and is reaped at once; one without requests is not counted.
"""

import logging
import time
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.orphans import Orphans
from shared.messages import FormatError, decode_heartbeat
from shared.reaping import ReapSummary, list_worker_ids, reap_worker
from shared.redis_client import RedisConnections
from shared.redis_keys import RedisKeys
from shared.redis_scripts import RedisScripts
from shared.store_errors import StoreRetry
from shared.subscription import GAP, Message, Subscription
from shared.ticks import until_tick

TICK_SECONDS = 1.0
MISSED_TICKS_UNTIL_DEAD = 15

logger = logging.getLogger(__name__)


class MissedTicks:
    """The consecutive ticks without a heartbeat, by worker."""

    def __init__(self, missed_ticks_until_dead: int) -> None:
        self._limit = missed_ticks_until_dead
        self._missed: dict[str, int] = {}

    def record_heartbeat(self, worker_id: str) -> None:
        """Restart the count of a worker."""
        self._missed[worker_id] = -1  # the current tick is not missed

    def forget_all(self) -> None:
        """Restart every count, because the observer may have missed heartbeats itself."""
        self._missed.clear()

    def tick(self, worker_ids: Iterable[str]) -> list[str]:
        """Count one tick for these workers, and return the dead ones."""
        self._missed = {worker_id: self._missed.get(worker_id, -1) + 1 for worker_id in worker_ids}
        return [worker_id for worker_id, missed in self._missed.items() if missed >= self._limit]


class Reaper:
    def __init__(
        self,
        connections: RedisConnections,
        keys: RedisKeys,
        *,
        missed_ticks_until_dead: int = MISSED_TICKS_UNTIL_DEAD,
        tick_seconds: float = TICK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        faults: FaultCounts | None = None,
    ) -> None:
        self._scripts = RedisScripts(connections.commands, keys)
        self._subscriber = connections.subscriber
        self._keys = keys
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._missed = MissedTicks(missed_ticks_until_dead)
        self.seen_worker_ids: set[str] = set()  # all workers that sent a heartbeat
        self.num_workers: int | None = None  # of the queue, at the last tick; None before the first
        self.faults = faults or FaultCounts()
        self._retry = StoreRetry(clock=clock)
        self._orphans = Orphans(self._scripts, tick_seconds, self.faults)

    async def run(self) -> None:
        """Listen to heartbeats and reap each tick, until cancelled."""
        # Two pings per silent tick, so that a live subscription receives something in each tick.
        subscription = Subscription(
            self._subscriber, [self._keys.heartbeat_channel], ping_seconds=self._tick_seconds / 2, clock=self._clock
        )
        try:
            while True:
                could_hear = await self._listen_until(subscription, self._clock() + until_tick(self._tick_seconds))
                await self.tick(could_hear=could_hear)
        finally:
            await subscription.aclose()

    def on_message(self, data: bytes) -> None:
        """Record an encoded heartbeat. An invalid one is counted."""
        try:
            worker_id = decode_heartbeat(data).worker_id
            self._missed.record_heartbeat(worker_id)
            self.seen_worker_ids.add(worker_id)
        except FormatError:
            self.faults.num_bad_heartbeats += 1

    async def tick(self, *, could_hear: bool) -> None:
        """Reap zombies and silent workers. Store errors end only this tick."""
        try:
            worker_ids = await list_worker_ids(self._scripts.redis, self._keys)
            self.num_workers = len(worker_ids)
            fenced = await self._without_fence(worker_ids)
            dead = self._missed.tick(worker_ids) if could_hear else []
            for worker_id in sorted({*fenced, *dead}):
                summary = await reap_worker(self._scripts, worker_id)
                if worker_id not in dead and summary == ReapSummary():
                    continue  # it is ending: its fence goes before its consumers
                self.faults.num_reaped += 1
                logger.warning("reaper: reaped worker %s: %s", worker_id, summary)
            await self._orphans.tick()
            self._retry.succeeded()
        except (RedisError, OSError) as error:
            self._retry.delay_after(error)
            logger.warning("reaper: tick skipped: %s", error)

    async def _listen_until(self, subscription: Subscription, deadline: float) -> bool:
        """Return whether anything was received.

        A message replaces pings until the middle of the next tick: an idle worker receives its own heartbeat.
        """
        num_replies = subscription.num_replies
        while (left := deadline - self._clock()) > 0:
            message = await subscription.get(left)
            if subscription.num_replies > num_replies:
                subscription.rest_until(deadline + self._tick_seconds / 2)
            if message is GAP:
                self._missed.forget_all()
            elif isinstance(message, Message):
                self.on_message(message.data)
        return subscription.num_replies > num_replies

    async def _without_fence(self, worker_ids: list[str]) -> list[str]:
        async with self._scripts.redis.pipeline(transaction=False) as pipeline:
            for worker_id in worker_ids:
                pipeline.exists(self._keys.fence(worker_id))
            found = await pipeline.execute()
        return [worker_id for worker_id, exists in zip(worker_ids, found, strict=True) if not exists]
