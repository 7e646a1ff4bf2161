"""How long a worker lets peers that hold less go first.

A peer that holds less and has room takes what waits within a step or so. One that does not is stopped, dead or busy for
long: whoever has waited for it for PATIENCE_SECONDS takes a little all the same, and the store forgets it until it asks
again (TAKE). Counted by this process's own clock.

It is part of a chat's way in, where several workers could take it (TAKE). It is pure: it knows counts and a clock that
it is given.
"""

import time
from collections.abc import Callable

from shared.redis_scripts import Taken

PATIENCE_SECONDS = 0.5  # longer than most steps, shorter than a tick
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.002, 0.05  # while something waits; doubled each time
IDLE_PAUSE_SECONDS = 0.1  # while nothing does: the next request is for a peer, which waits in a blocking read


class Patience:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # it has waited, while there was something to take
        self._pause_seconds = IDLE_PAUSE_SECONDS

    def observe(self, taken: Taken) -> None:
        if taken.entries or not taken.others_wait:
            self._since, self._pause_seconds = None, IDLE_PAUSE_SECONDS
        elif self._since is None:
            self._since, self._pause_seconds = self._clock(), MIN_PAUSE_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    @property
    def is_over(self) -> bool:
        return self._since is not None and self._clock() - self._since >= PATIENCE_SECONDS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next TAKE if the last one allowed nothing."""
        return self._pause_seconds
