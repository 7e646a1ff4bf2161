"""How long a request may wait and take: the body's fields, the gateway's defaults and limit. Pure.

    timeout_seconds          until the whole answer is there      504 deadline_exceeded
    queue_timeout_seconds    until a worker begins with it        503 queue_timeout

A request without a time in the queue that is taken while no worker is ready waits for at most
--no-worker-wait-seconds, and is then answered in the same way: its client must not wait for a worker that never comes.

What is over is told as an event where the answer has begun as a stream, else with the status. Times are the fleet
clock's (shared/fleet_clock.py), so that a worker can refuse what has waited too long before it computes anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from gateway.errors import InvalidRequest
from gateway.requests.openai_schema import GenerationFields
from gateway.requests.planning import PlannedRequest


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; 0 = none."""

    total_seconds: float
    queue_seconds: float
    no_worker_seconds: float = 0.0  # in place of no time in the queue, while no worker is ready

    def __bool__(self) -> bool:
        return bool(self.total_seconds or self.queue_seconds)


def timeouts_of(fields: GenerationFields, defaults: Timeouts, max_seconds: float) -> Timeouts:
    """Raises InvalidRequest."""
    for param, seconds in (
        ("timeout_seconds", fields.timeout_seconds),
        ("queue_timeout_seconds", fields.queue_timeout_seconds),
    ):
        if seconds is not None and seconds > max_seconds:
            raise InvalidRequest(f"{param}: expected at most {max_seconds:g}; got {seconds:g}.", param=param)
    return Timeouts(
        defaults.total_seconds if fields.timeout_seconds is None else fields.timeout_seconds,
        defaults.queue_seconds if fields.queue_timeout_seconds is None else fields.queue_timeout_seconds,
        defaults.no_worker_seconds,
    )


def without_worker(timeouts: Timeouts) -> Timeouts:
    """Those of a request that is taken while no worker is ready."""
    return replace(timeouts, queue_seconds=timeouts.queue_seconds or timeouts.no_worker_seconds)


def with_deadlines(planned: Sequence[PlannedRequest], timeouts: Timeouts, now_seconds: float) -> list[PlannedRequest]:
    deadline, queue_deadline = (
        now_seconds + seconds if seconds else None for seconds in (timeouts.total_seconds, timeouts.queue_seconds)
    )
    return [
        replace(plan, request=structs.replace(plan.request, deadline=deadline, queue_deadline=queue_deadline))
        for plan in planned
    ]
