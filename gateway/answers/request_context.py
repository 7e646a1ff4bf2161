"""What is known of a request beside its body: who sends it, and what its headers say. It came over HTTP, or stands for
a line of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from gateway.auth.access import CHARGE
from gateway.auth.rate_limits import Account, Charge
from gateway.requests.planning import Timeouts
from gateway.state import STATE, GatewayState

TRACEPARENT = web.RequestKey("traceparent", str)  # set by a middleware

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RequestContext:
    state: GatewayState
    charge: Charge  # of the request; whoever answers ends it
    headers: Mapping[str, str]
    default_timeouts: Timeouts
    default_detach_seconds: float  # of a kept answer
    traceparent: str = ""
    is_batch: bool = False  # a line of one: nobody waits at a connection, so it is in no metric of such waits

    @property
    def account(self) -> Account:
        return self.charge.account

    async def work(self, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool = True) -> _Result:
        """As GatewayState.work()."""
        return await self.state.work(self.account, num_bytes, work, may_refuse=may_refuse)


def context_of(http: web.Request) -> RequestContext:
    state = http.app[STATE]
    return RequestContext(
        state,
        http[CHARGE],
        http.headers,
        state.default_timeouts,
        state.settings.default_detach_seconds,
        http[TRACEPARENT],
    )
