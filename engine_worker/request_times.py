"""How long each request of this worker waited, was prefilled and decoded: into histograms, and to whoever traces.

    queue     from the entry's place in the queue (by the store's clock) until this worker claimed it
    prefill   until its first new token was stored; waiting for blocks in the engine counts here
    decode    until its end was stored

Times of several machines are compared, so nothing decides by them. A request that changed its owner has a queue and a
prefill with each. Knows neither Prometheus nor OpenTelemetry. It stands beside a token's way back: the worker tells it
when something was stored.
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
    def claimed(self, times: RequestTimes, *, is_resumed: bool) -> None: ...

    def began(self, times: RequestTimes) -> None:
        """`first_token` is known."""

    def ended(self, times: RequestTimes, ended: float, reason: str) -> None: ...


class RequestClock:
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
        """New tokens of these requests."""
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
        """It was given back."""
        self._times.pop(request_id, None)

    def forget_everything(self) -> None:
        """Others have the requests now, and tell of them."""
        self._times.clear()
