"""How long a worker lets peers that hold fewer requests go first.

A peer with room takes a waiting request within about a step. One that does not is stopped, dead, or busy: after
PATIENCE_SECONDS this worker takes a few requests anyway, and the store ignores the peer until its next TAKE. Pure; time
is this process's clock.
"""

import time
from collections.abc import Callable

from shared.redis_scripts import Taken

PATIENCE_SECONDS = 0.5  # longer than most steps, shorter than a tick
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.002, 0.05  # while something waits; doubled each time
IDLE_PAUSE_SECONDS = 0.1  # while nothing waits: the next request goes to a peer in a blocking read


class Patience:
    """The wait of one worker for its peers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # start of the wait, while requests wait
        self._pause_seconds = IDLE_PAUSE_SECONDS

    def observe(self, taken: Taken) -> None:
        """Update the wait with the reply of a TAKE."""
        if taken.entries or not taken.others_wait:
            self._since, self._pause_seconds = None, IDLE_PAUSE_SECONDS
        elif self._since is None:
            self._since, self._pause_seconds = self._clock(), MIN_PAUSE_SECONDS
        else:
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether this worker need not wait for its peers any longer."""
        return self._since is not None and self._clock() - self._since >= PATIENCE_SECONDS

    @property
    def pause_seconds(self) -> float:
        """The time before the next TAKE if the last one allowed nothing."""
        return self._pause_seconds
