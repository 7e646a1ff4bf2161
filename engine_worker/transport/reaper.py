"""Finds dead workers and requeues their requests, and ends orphaned requests (orphans.py).

It runs in every worker, and only the observer looks (presence.py), so the cost does not grow with the square of the
number of workers.

A worker without a beat for --dead-after-seconds is dead. One without a beat for 3 s is dead too if it does not listen
to its control messages, because the kernel closes the connections of a process that has ended. Workers of older
releases do not beat; the observer listens to their heartbeats and counts ticks without one. A late tick counts as one,
and a tick in which it received nothing, not even the reply to its ping, does not count. A consumer without a fence is a
zombie, and is reaped at once; one without requests is not counted.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

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
from shared.ticks import next_tick, until_tick

TICK_SECONDS = 1.0
GONE_AFTER_SECONDS = 3.0  # without a beat and a subscription; a live worker connects again sooner

logger = logging.getLogger(__name__)


class Observing(Protocol):
    """Whether this worker observes the others: engine_worker/transport/presence.py."""

    @property
    def is_observer(self) -> bool: ...

    @property
    def is_steady(self) -> bool: ...

    @property
    def fleet_seconds(self) -> float: ...

    @property
    def dead_after_seconds(self) -> float: ...


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
        presence: Observing,
        *,
        tick_seconds: float = TICK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        faults: FaultCounts | None = None,
    ) -> None:
        self._scripts = RedisScripts(connections.commands, keys)
        self._subscriber = connections.subscriber
        self._keys = keys
        self._presence = presence
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._missed = MissedTicks(round(presence.dead_after_seconds / tick_seconds))
        self._hears_nothing = True  # every worker of the last tick beats
        self.faults = faults or FaultCounts()
        self._retry = StoreRetry(clock=clock)
        self._orphans = Orphans(self._scripts, tick_seconds, self.faults)

    async def run(self) -> None:
        """Look for dead workers at each tick while this worker is the observer, until cancelled."""
        while True:
            if self._hears_nothing:
                await next_tick(self._tick_seconds)
                await self.tick(could_hear=False)
            else:
                await self._listen_and_tick()

    async def _listen_and_tick(self) -> None:
        """Tick and listen to heartbeats while some workers do not beat."""
        # Two pings per silent tick, so that a live subscription receives something in each tick.
        subscription = Subscription(
            self._subscriber, [self._keys.heartbeat_channel], ping_seconds=self._tick_seconds / 2, clock=self._clock
        )
        try:
            while not self._hears_nothing:
                could_hear = await self._listen_until(subscription, self._clock() + until_tick(self._tick_seconds))
                await self.tick(could_hear=could_hear)
        finally:
            await subscription.aclose()

    def on_message(self, data: bytes) -> None:
        """Record an encoded heartbeat. An invalid one is counted."""
        try:
            self._missed.record_heartbeat(decode_heartbeat(data).worker_id)
        except FormatError:
            self.faults.num_bad_heartbeats += 1

    async def tick(self, *, could_hear: bool) -> None:
        """Reap zombies and silent workers, if this worker observes. Store errors end only this tick."""
        if not self._presence.is_observer:
            self._hears_nothing = True
            self._missed.forget_all()
            self._orphans.forget_all()
            return
        try:
            await self._reap_dead(could_hear)
            await self._orphans.tick()
            self._retry.succeeded()
        except (RedisError, OSError) as error:
            self._retry.delay_after(error)
            logger.warning("reaper: tick skipped: %s", error)

    async def _reap_dead(self, could_hear: bool) -> None:
        worker_ids, beats = await asyncio.gather(
            list_worker_ids(self._scripts.redis, self._keys), self._scripts.beats()
        )
        fenced = await self._without_fence(worker_ids)
        silent = self._silent(beats, self._presence.dead_after_seconds)
        ended = await self._without_subscription(self._silent(beats, GONE_AFTER_SECONDS).intersection(worker_ids))
        unknown = [worker_id for worker_id in worker_ids if worker_id not in beats]
        self._hears_nothing = not unknown
        dead = {*silent.intersection(worker_ids), *ended, *(self._missed.tick(unknown) if could_hear else [])}
        await self._scripts.forget_beats(silent.difference(worker_ids))  # ended: nothing is left of it
        for worker_id in sorted({*fenced, *dead}):
            summary = await reap_worker(self._scripts, worker_id)
            if worker_id not in dead and summary == ReapSummary():
                continue  # it is ending: its fence goes before its consumers
            self.faults.num_reaped += 1
            logger.warning("reaper: reaped worker %s: %s", worker_id, summary)

    def _silent(self, beats: Mapping[str, float], seconds: float) -> set[str]:
        """Return the workers without a beat for this long; none while this worker cannot judge it."""
        if not self._presence.is_steady:
            return set()
        long_ago = self._presence.fleet_seconds - seconds
        return {worker_id for worker_id, beat_seconds in beats.items() if beat_seconds <= long_ago}

    async def _without_subscription(self, worker_ids: Iterable[str]) -> set[str]:
        """Return those that do not listen to their control messages: their connections are closed."""
        if not (asked := sorted(worker_ids)):
            return set()
        channels = [self._keys.control_channel(worker_id) for worker_id in asked]
        replies: Any = await self._scripts.redis.pubsub_numsub(*channels)
        return {worker_id for worker_id, (_, count) in zip(asked, replies, strict=True) if not count}

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
