"""The policy after the end of a child process: restart after a delay, or give up. Pure; time is passed in.

A single crash is followed by an immediate restart, because requests are waiting. Repeated crashes are followed by
growing delays. The supervisor gives up after too many crashes within a window, after two starts that end alike before
the child was ready, and when the child reports that it cannot start (a wrong flag or too little memory).
"""

from collections import deque
from dataclasses import dataclass, field

CANNOT_START = 2  # exit status of our programs for wrong settings, and for a model that does not fit
MAX_DEATHS = 5
WINDOW_SECONDS = 60.0
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 8.0
PATIENT_DELAY_SECONDS = 30.0  # where a policy that may not give up would do so


@dataclass(frozen=True, slots=True)
class Restart:
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(slots=True)
class RestartPolicy:
    may_give_up: bool = True  # False for a child without which the others continue
    _deaths_at: deque[float] = field(default_factory=deque)
    _last_failed_start: int | None = None  # exit status of the last run if it ended before it was ready

    def after_death(self, now_seconds: float, *, exit_status: int, was_ready: bool) -> Restart | GiveUp:
        answer = self._after_death(now_seconds, exit_status, was_ready)
        return Restart(PATIENT_DELAY_SECONDS) if isinstance(answer, GiveUp) and not self.may_give_up else answer

    def _after_death(self, now_seconds: float, exit_status: int, was_ready: bool) -> Restart | GiveUp:
        self._deaths_at.append(now_seconds)
        while now_seconds - self._deaths_at[0] > WINDOW_SECONDS:
            self._deaths_at.popleft()
        count = len(self._deaths_at)
        if count >= MAX_DEATHS:
            return GiveUp(f"it crashed {count} times within {WINDOW_SECONDS:.0f} s")
        if not was_ready and exit_status == CANNOT_START:
            return GiveUp("it cannot start with these settings")
        if not was_ready and exit_status == self._last_failed_start:
            return GiveUp(f"it exited twice with {describe_exit(exit_status)} before it was ready")
        self._last_failed_start = None if was_ready else exit_status
        if count == 1:
            return Restart(0.0)
        return Restart(min(FIRST_DELAY_SECONDS * 2 ** (count - 2), MAX_DELAY_SECONDS))


def describe_exit(status: int) -> str:
    """Describe an exit status of asyncio, where minus N means signal N."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
