"""Who asks for an answer, and what is said beside the body: by an HTTP request, or for a line of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway.auth.charges import Charge
from gateway.auth.rate_limits import Account
from gateway.requests.deadlines import Timeouts
from gateway.state import GatewayState

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Asker:
    state: GatewayState
    charge: Charge  # of what is asked; whoever answers ends it
    headers: Mapping[str, str]
    default_timeouts: Timeouts
    default_detach_seconds: float  # of a kept answer
    traceparent: str = ""
    is_recorded: bool = True  # in the metrics of what clients wait for

    @property
    def account(self) -> Account:
        return self.charge.account

    async def work(self, num_bytes: int | None, work: Callable[[], _Result], *, may_refuse: bool = True) -> _Result:
        """As GatewayState.work()."""
        return await self.state.work(self.account, num_bytes, work, may_refuse=may_refuse)
