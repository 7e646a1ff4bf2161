"""The parts of a request's time as spans of its trace: queue, prefill, decode."""

from engine_worker.request_times import RequestTimes
from shared.tracing import Tracing, valid_traceparent


class RequestSpans:
    """A TimesSink. Requests without a trace get no spans."""

    def __init__(self, tracing: Tracing, worker: str, model: str) -> None:
        self._tracing = tracing
        self._attributes = {"gen_ai.provider.name": "pagestream", "gen_ai.request.model": model, "worker": worker}

    def claimed(self, times: RequestTimes, *, is_resumed: bool) -> None:
        self._record("queue", times, times.queued, times.claimed, resumed=is_resumed)

    def began(self, times: RequestTimes) -> None:
        assert times.first_token is not None
        self._record("prefill", times, times.claimed, times.first_token)

    def ended(self, times: RequestTimes, ended: float, reason: str) -> None:
        if times.first_token is not None:
            self._record("decode", times, times.first_token, ended, reason=reason)

    def _record(self, name: str, times: RequestTimes, began: float, ended: float, **more: str | bool) -> None:
        if valid_traceparent(times.traceparent):
            self._tracing.record(name, times.traceparent, began, ended, {**self._attributes, **more})
