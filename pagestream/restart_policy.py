"""Decides what follows the end of a child process: start it again after a delay, or give up. Pure; time is passed in.

One death is an accident and is answered at once, since requests wait for it. Deaths in a row are answered ever later,
and some end the whole: too many within a window, two starts in a row that ended alike before the child was ready, and a
child that says itself that it cannot start (a wrong flag or too little memory does not heal by trying).

The first step of a takeover under `pagestream serve`: crew.py asks when a child has died. It knows no process,
no store, and not what the child does.
"""

from collections import deque
from dataclasses import dataclass, field

CANNOT_START = 2  # exit status of our programs for wrong settings, and for a model that does not fit the machine
MAX_DEATHS = 5
WINDOW_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Restart:
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(slots=True)
class RestartPolicy:
    _deaths_at: deque[float] = field(default_factory=deque)
    _last_failed_start: int | None = None  # exit status of the last life, if it ended before it was ready

    def after_death(self, now_seconds: float, *, exit_status: int, was_ready: bool) -> Restart | GiveUp:
        self._deaths_at.append(now_seconds)
        while now_seconds - self._deaths_at[0] > WINDOW_SECONDS:
            self._deaths_at.popleft()
        count = len(self._deaths_at)
        if count >= MAX_DEATHS:
            return GiveUp(f"it died {count} times within {WINDOW_SECONDS:.0f} s")
        if not was_ready and exit_status == CANNOT_START:
            return GiveUp("it cannot start like this")
        if not was_ready and exit_status == self._last_failed_start:
            return GiveUp(f"it ended twice with {describe_exit(exit_status)} before it was ready")
        self._last_failed_start = None if was_ready else exit_status
        if count == 1:
            return Restart(0.0)
        return Restart(min(FIRST_DELAY_SECONDS * 2 ** (count - 2), MAX_DELAY_SECONDS))


def describe_exit(status: int) -> str:
    """`status` as asyncio gives it: minus the signal's number if one ended the process."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
