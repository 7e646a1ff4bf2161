"""Everything about a request except its body. A request came over HTTP, or is a line of a batch."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from gateway.auth.access import ACCOUNT
from gateway.auth.rate_limits import Account
from gateway.fleet import Timeouts
from gateway.http.state import STATE, TRACEPARENT, GatewayState
from gateway.pipeline.answer_kind import KINDS, AnswerKind

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The sender and the headers of a request."""

    state: GatewayState
    kinds: Mapping[str, AnswerKind]  # by name, for kept answers
    account: Account  # charged for the request
    headers: Mapping[str, str]
    default_timeouts: Timeouts
    default_detach_seconds: float  # of a stored answer
    traceparent: str = ""
    for_batch: bool = False  # a line of a batch, which latency metrics leave out
    arrived_at: float = field(default_factory=time.monotonic)  # seconds

    def work(self, num_bytes: int | None, work: Callable[[], _Result]) -> Awaitable[_Result]:
        """Run work for the account without blocking the event loop, and return its result (reader_pool.py)."""
        return self.state.pool.run(self.account, num_bytes, work)

    def read(self, num_bytes: int | None, work: Callable[[], _Result]) -> Awaitable[_Result]:
        """Run the parsing of a request; if it is long, in a process, which does not hold this interpreter's lock."""
        return self.state.readers.run(self.account, num_bytes, work)


def context_of(http: web.Request) -> RequestContext:
    """Return the context of an HTTP request."""
    state = http.app[STATE]
    return RequestContext(
        state,
        http.app[KINDS],
        http[ACCOUNT],
        http.headers,
        state.default_timeouts,
        state.settings.default_detach_seconds,
        http[TRACEPARENT],
    )
