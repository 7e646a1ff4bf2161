"""Measures how long each request of this worker was queued, prefilled, and decoded; for histograms and traces.

    queue     from entering the queue (by the store's clock) until this worker claimed it
    prefill   until its first new token was stored, including the wait for blocks in the engine
    decode    until its end was stored

Clocks of several machines are compared, so no decision depends on these times. A request that changed its worker has a
queue and a prefill time with each.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine_worker.transport.claims import ClaimedRequest

FIRST_ATTEMPT = 1


@dataclass(slots=True)
class RequestTimes:
    """Seconds since 1970."""

    traceparent: str
    queued: float
    claimed: float
    first_token: float | None = None


class TimesSink(Protocol):
    """Receives the times of requests."""

    def claimed(self, times: RequestTimes, *, is_resumed: bool) -> None: ...

    def began(self, times: RequestTimes) -> None:
        """Receive a request whose first token was stored."""

    def ended(self, times: RequestTimes, ended: float, reason: str) -> None: ...


class RequestClock:
    """The times of the requests that this worker holds."""

    def __init__(self, sinks: Iterable[TimesSink], clock: Callable[[], float] = time.time) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._times: dict[str, RequestTimes] = {}

    def claimed(self, claim: ClaimedRequest) -> None:
        now = self._clock()
        queued = claim.queued_ms / 1000
        times = RequestTimes(claim.request.traceparent, min(queued, now), now)
        self._times[claim.request.request_id] = times
        for sink in self._sinks:
            sink.claimed(times, is_resumed=claim.attempt > FIRST_ATTEMPT)

    def stored(self, request_ids: Iterable[str]) -> None:
        """Record that new tokens of these requests were stored."""
        for request_id in request_ids:
            times = self._times[request_id]
            if times.first_token is None:
                times.first_token = self._clock()
                for sink in self._sinks:
                    sink.began(times)

    def ended(self, request_id: str, reason: str) -> None:
        times, now = self._times.pop(request_id), self._clock()
        for sink in self._sinks:
            sink.ended(times, now, reason)

    def forget(self, request_id: str) -> None:
        """Drop a request that was returned to the queue."""
        self._times.pop(request_id, None)

    def forget_everything(self) -> None:
        """Drop all requests, because other workers have them now."""
        self._times.clear()
