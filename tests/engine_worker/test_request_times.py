"""Durations of a request's phases, measured with a test clock."""

from engine_worker.request_times import RequestClock, RequestTimes
from engine_worker.transport.claims import ClaimedRequest
from tests.builders import make_request


class Sink:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def claimed(self, times: RequestTimes, *, is_resumed: bool) -> None:
        self.events.append(("claimed", times.queued, times.claimed, is_resumed))

    def began(self, times: RequestTimes) -> None:
        self.events.append(("began", times.first_token))

    def ended(self, times: RequestTimes, ended: float, reason: str) -> None:
        self.events.append(("ended", times.first_token, ended, reason))


def claim(request_id: str, queued_ms: int, attempt: int = 1) -> ClaimedRequest:
    request = make_request(3, request_id)
    return ClaimedRequest(
        request, [], "g", attempt=attempt, queue="q", entry_id=b"1-0", solo=False, queued_ms=queued_ms
    )


def test_request_clock_reports_each_phase_once() -> None:
    now, sink = [100.0], Sink()
    clock = RequestClock([sink], lambda: now[0])
    clock.claimed(claim("a", 98500))
    now[0] = 101.0
    clock.stored(["a"])
    now[0] = 102.0
    clock.stored(["a"])
    clock.ended("a", "stop")
    assert sink.events == [("claimed", 98.5, 100.0, False), ("began", 101.0), ("ended", 101.0, 102.0, "stop")]


def test_request_clock_store_ahead_gives_no_negative_wait() -> None:
    sink = Sink()
    RequestClock([sink], lambda: 100.0).claimed(claim("a", 100500, attempt=2))
    assert sink.events == [("claimed", 100.0, 100.0, True)]


def test_request_clock_accepts_same_request_after_fence() -> None:
    sink = Sink()
    clock = RequestClock([sink], lambda: 100.0)
    clock.claimed(claim("a", 1))
    clock.forget_everything()
    clock.claimed(claim("a", 1, attempt=2))
    clock.ended("a", "cancelled")
    assert sink.events[-1] == ("ended", None, 100.0, "cancelled")
