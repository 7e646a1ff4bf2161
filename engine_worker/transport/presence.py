"""A worker's beats in the store, and which worker observes the others.

Each worker ticks the fleet clock once a second, and the store notes the clock's time beside the worker's id. So one
observer sees how long every worker has been silent, and a successor knows it too. The store gives the lease to the
first worker that asks when the last lease has ended; a steady worker takes it from one that is not.

A worker is steady while its ticks have come without a long pause, and the fleet clock without a jump, for the time
after which a silent worker is dead. After a pause of all processes, or an outage or loss of the store, every beat is
old, and no one is steady until the live workers have beaten again. Only a steady observer judges silence.
"""

import time
from collections.abc import Callable

from shared.redis_scripts import RedisScripts

LEASE_SECONDS = 3.0
MIN_PAUSE_SECONDS = 2.0  # ticks come once a second, and may be late
PAUSE_RATIO = 1 / 3  # of the time until a worker is dead; with the second between two beats this is less than it


class Presence:
    def __init__(
        self,
        scripts: RedisScripts,
        worker_id: Callable[[], str],
        dead_after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it; `worker_id` returns the incarnation, or "" before it is registered."""
        self.has_peers = True  # until a tick shows that no other worker beats
        self.fleet_seconds = 0.0  # the fleet clock at the last tick
        self.dead_after_seconds = dead_after_seconds
        self._scripts = scripts
        self._worker_id = worker_id
        self._clock = clock
        self._max_pause_seconds = max(MIN_PAUSE_SECONDS, dead_after_seconds * PAUSE_RATIO)
        self._steady_since: float | None = None
        self._ticked_at = 0.0
        self.is_observer = False

    async def tick(self, seconds: float) -> float:
        """Beat, and return the fleet clock. Raises the store's errors."""
        try:
            reply = await self._scripts.beat(
                seconds, self._worker_id(), lease_seconds=LEASE_SECONDS, is_steady=self.is_steady
            )
        except BaseException:
            self._steady_since, self.is_observer = None, False
            raise
        self._record(reply.seconds)
        self.is_observer = reply.observes
        self.has_peers = reply.has_peers
        return reply.seconds

    @property
    def is_steady(self) -> bool:
        return self._steady_since is not None and self._ticked_at - self._steady_since >= self.dead_after_seconds

    def _record(self, fleet_seconds: float) -> None:
        now = self._clock()
        pause = now - self._ticked_at
        jump = abs(fleet_seconds - self.fleet_seconds - pause)
        if self._steady_since is None or max(pause, jump) > self._max_pause_seconds:
            self._steady_since = now
        self._ticked_at, self.fleet_seconds = now, fleet_seconds
