"""Progress lines of a start: the phase, its progress, and the time it took.

On a terminal the line of the running phase is rewritten in place. Elsewhere a line appears at the end of a phase and
every ten seconds while it runs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

SILENCE_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[K"
_LABELS = {"allocate_kv": "allocate KV", "warmup": "warm up"}


class PhaseReport(Protocol):
    def __call__(self, phase: str, progress: float, detail: str) -> None:
        """Report `progress`, 0 to 1, within a phase."""


@dataclass
class _Running:
    phase: str
    started_at: float
    printed_at: float
    progress: float = 0.0
    detail: str = ""


class PhaseConsole:
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._rewrites = stream.isatty()
        self._open_line = False
        self._running: dict[str, _Running] = {}

    def update(self, who: str, phase: str, progress: float, detail: str = "") -> None:
        running = self._running.get(who)
        now = self._clock()
        if running is None or running.phase != phase:
            self.end(who)
            running = self._running[who] = _Running(phase, now, now)
        running.progress, running.detail = progress, detail
        if self._rewrites:
            self._write(self._line(who, running), ends=False)
        elif now - running.printed_at >= SILENCE_SECONDS:
            running.printed_at = now
            self._write(self._line(who, running))

    def end(self, who: str) -> None:
        """Complete the running phase of `who`."""
        running = self._running.pop(who, None)
        if running is not None:
            if running.progress < 1.0:  # the detail of the last report is outdated
                running.progress, running.detail = 1.0, ""
            self._write(self._line(who, running))

    def abandon(self, who: str) -> None:
        """Drop the running phase of `who`, which will not complete."""
        self._running.pop(who, None)

    def print(self, text: str) -> None:
        """Print lines that belong to no phase."""
        self._write(text)

    def _line(self, who: str, running: _Running) -> str:
        seconds = self._clock() - running.started_at
        label = _LABELS.get(running.phase, running.phase)
        return f"  {who:<9} {label:<12} {running.progress:4.0%} {seconds:6.1f} s  {running.detail}".rstrip()

    def _write(self, text: str, *, ends: bool = True) -> None:
        self._stream.write((_CLEAR_LINE if self._open_line else "") + text + ("\n" if ends else ""))
        self._stream.flush()
        self._open_line = not ends
