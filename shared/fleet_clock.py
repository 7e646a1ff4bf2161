"""A clock in seconds that all gateways and workers of a model share, and that no wall clock affects.

Each process adds the time of its own monotonic clock since it last read the shared value, and all agree on the largest
result. It is a lower bound of the time passed, exact to a round trip while any process runs; it stops while none does.
Only differences have a meaning. It is used for deadlines of requests.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from shared.store_errors import StoreRetry, got_no_reply
from shared.ticks import next_tick

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class FleetClock:
    def __init__(self, tick: Callable[[float], Awaitable[float]], clock: Callable[[], float] = time.monotonic) -> None:
        """`tick`: sends this process's count to the store and returns the shared value, as RedisScripts.tick()."""
        self._tick = tick
        self._clock = clock
        self._seen_seconds = 0.0  # shared value at the last look
        self._seen_at = self._heard_at = clock()
        self.is_set = False  # whether the shared value was read; before that now() is much too low

    def now(self) -> float:
        return self._seen_seconds + self._clock() - self._seen_at

    def silent_seconds(self) -> float:
        """Return the time since the store's last reply; an error is one too."""
        return self._clock() - self._heard_at

    async def run(self) -> None:
        """Synchronize once a second, in a separate task. Without the store the local clock continues.

        Raises:
            StoreRefused: If the store cannot be used as configured. This task is the first to notice it.
        """
        retry = StoreRetry(has_succeeded=self.is_set)
        while True:
            try:
                await self.tick()
                retry.succeeded()
            except (RedisError, OSError) as error:
                if not got_no_reply(error):
                    self._heard_at = self._clock()
                retry.delay_after(error)
                logger.debug("fleet clock: tick failed: %s", error)
            await next_tick(TICK_SECONDS)

    async def tick(self) -> None:
        """Synchronize once. Raises the store's errors; safe to repeat."""
        common = await self._tick(self.now())
        self._heard_at = self._clock()
        if common > self.now():  # otherwise the local count is better: it includes no round trip
            self._seen_seconds, self._seen_at = common, self._clock()
        self.is_set = True
