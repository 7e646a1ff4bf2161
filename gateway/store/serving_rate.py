"""How many requests the fleet serves per second while others wait, which tells whether a new one starts in time.

Without a backlog the rate is that of the clients, and says nothing of the fleet. So it is measured only from the moment
on from which interactive requests have always waited, and only after enough of them have ended.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.fleet import Fleet
from gateway.store.store_probe import num_waiting
from shared.redis_keys import INTERACTIVE, RedisKeys
from shared.ticks import next_tick

POLL_SECONDS = 1.0
WINDOW_SECONDS = 60.0
MIN_SECONDS = 5.0
MIN_FINISHED = 16
# Requests that began together end together: with fewer than two generations the rate could be wrong by any factor.
GENERATIONS = 2
ASKED_SECONDS = 60.0  # the queue is read only if a request with a time limit came within this time


class ServingRate:
    """The rate of one model's fleet."""

    def __init__(
        self, redis: Redis, keys: RedisKeys, fleet: Fleet, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._fleet = fleet
        self._clock = clock
        self._asked_at = -ASKED_SECONDS
        self._samples: deque[tuple[float, int]] = deque()  # time and number of ended requests, oldest first

    async def watch(self) -> None:
        """Look at the queue each second. Runs as an owner task."""
        while True:
            await next_tick(POLL_SECONDS)
            if self._clock() - self._asked_at < ASKED_SECONDS:
                with suppress(RedisError, OSError):
                    waiting = await num_waiting(self._redis, self._keys.queue(INTERACTIVE))
                    self.record(is_backlog=waiting > 0)
            else:
                self._samples.clear()

    def record(self, *, is_backlog: bool) -> None:
        """Record whether requests wait now."""
        if not is_backlog:
            self._samples.clear()
            return
        now = self._clock()
        self._samples.append((now, self._fleet.num_finished))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def per_second(self) -> float | None:
        """Return the requests that end per second, or None while that is not known."""
        self._asked_at = self._clock()
        if not self._samples:
            return None
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        num_running = sum(heartbeat.running for heartbeat in self._fleet.ready)
        seconds, num_finished = last_at - first_at, last - first
        if seconds < MIN_SECONDS or num_finished < max(MIN_FINISHED, GENERATIONS * num_running):
            return None
        return num_finished / seconds
