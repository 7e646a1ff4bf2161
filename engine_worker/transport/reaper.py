"""Finds dead workers and requeues what they held, and ends what dead gateways left (orphans.py). Runs in every worker.

Liveness is counted in ticks of this process's own clock: a worker that sent no heartbeat for 15 ticks is dead. A tick
that comes late is still one tick, so a paused observer reaps no one; and a tick in which the observer heard nothing at
all, not even the answer to its own ping, does not count. A consumer without a fence is a zombie's: reaped at once.

It is the first step of a takeover: what is requeued here, another worker claims. It knows no tokens.
"""

import logging
import time
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from engine_worker.transport.fault_counts import FaultCounts
from engine_worker.transport.orphans import Orphans
from shared.messages import FormatError, decode_heartbeat
from shared.reaping import list_worker_ids, reap_worker
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
    """How many ticks in a row each known worker has been silent."""

    def __init__(self, missed_ticks_until_dead: int) -> None:
        self._limit = missed_ticks_until_dead
        self._missed: dict[str, int] = {}

    def record_heartbeat(self, worker_id: str) -> None:
        self._missed[worker_id] = -1  # the tick that ends now is not missed

    def forget_all(self) -> None:
        """The observer may have missed beats itself: every count starts anew."""
        self._missed.clear()

    def tick(self, worker_ids: Iterable[str]) -> list[str]:
        """Count one tick for the workers that exist; returns those that are dead now."""
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
        self.seen_worker_ids: set[str] = set()  # ids of all workers that sent a heartbeat
        self.faults = faults or FaultCounts()
        self._retry = StoreRetry(clock=clock)
        self._orphans = Orphans(self._scripts, tick_seconds, self.faults)

    async def run(self) -> None:
        """Owner task."""
        # Two pings a tick, until one hears: so a live subscription always hears something between two ticks.
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
        try:
            worker_id = decode_heartbeat(data).worker_id
            self._missed.record_heartbeat(worker_id)
            self.seen_worker_ids.add(worker_id)
        except FormatError:
            self.faults.num_bad_heartbeats += 1

    async def tick(self, *, could_hear: bool) -> None:
        """Reap zombies, and whoever has been silent for too long. Store errors end this tick only."""
        try:
            worker_ids = await list_worker_ids(self._scripts.redis, self._keys)
            fenced = await self._without_fence(worker_ids)
            dead = self._missed.tick(worker_ids) if could_hear else []
            for worker_id in sorted({*fenced, *dead}):
                summary = await reap_worker(self._scripts, worker_id)
                self.faults.num_reaped += 1
                logger.warning("reaped worker %s: %s", worker_id, summary)
            await self._orphans.tick()
            self._retry.succeeded()
        except (RedisError, OSError) as error:
            self._retry.delay_after(error)
            logger.warning("no reaping in this tick: %s", error)

    async def _listen_until(self, subscription: Subscription, deadline: float) -> bool:
        """Return whether anything was heard. What was is answer enough until the middle of the tick behind this one: an
        idle worker hears its own heartbeat and pings nobody."""
        num_heard = subscription.num_heard
        while (left := deadline - self._clock()) > 0:
            message = await subscription.get(left)
            if subscription.num_heard > num_heard:
                subscription.rest_until(deadline + self._tick_seconds / 2)
            if message is GAP:
                self._missed.forget_all()
            elif isinstance(message, Message):
                self.on_message(message.data)
        return subscription.num_heard > num_heard

    async def _without_fence(self, worker_ids: list[str]) -> list[str]:
        async with self._scripts.redis.pipeline(transaction=False) as pipeline:
            for worker_id in worker_ids:
                pipeline.exists(self._keys.fence(worker_id))
            found = await pipeline.execute()
        return [worker_id for worker_id, exists in zip(worker_ids, found, strict=True) if not exists]
