"""Seconds that mean the same to every gateway and worker of a model, and that no wall clock moves.

Each process adds what its own monotonic clock has counted since it last saw the common value, and all agree on the
largest of these: a lower bound of the time that has really passed, and exact to a round trip while anybody runs. The
value itself means nothing, only differences do. Where nobody runs, it stands still.

It is used in a chat's way in for its deadlines, and in every look at them. It knows no request.
"""

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from shared.redis_scripts import RedisScripts
from shared.store_errors import StoreRetry
from shared.ticks import next_tick

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class FleetClock:
    def __init__(self, scripts: RedisScripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts = scripts
        self._clock = clock
        self._seen_seconds = 0.0  # of the common value
        self._seen_at = clock()
        self.is_set = False  # whether the store was heard at all: before, now() is far behind that of others

    def now(self) -> float:
        return self._seen_seconds + self._clock() - self._seen_at

    async def run(self) -> None:
        """Owner task. While the store is away, the own count goes on.

        It writes once a second, so this is where a process learns that it cannot use the store: raises StoreRefused.
        """
        retry = StoreRetry(has_succeeded=self.is_set)
        while True:
            try:
                await self.tick()
                retry.succeeded()
            except (RedisError, OSError) as error:
                retry.delay_after(error)
                logger.debug("no tick of the fleet's clock: %s", error)
            await next_tick(TICK_SECONDS)

    async def tick(self) -> None:
        """Raises the store's errors; may be repeated."""
        common = await self._scripts.tick(self.now())
        if common > self.now():  # else the own count is as good, and has no round trip in it
            self._seen_seconds, self._seen_at = common, self._clock()
        self.is_set = True
