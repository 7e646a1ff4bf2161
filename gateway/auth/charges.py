"""The place of a request in its key's account: taken before anything is done for it, given back once."""

from collections.abc import Callable
from functools import partial
from types import TracebackType

from aiohttp import web

from gateway.auth.rate_limits import Account, Exceeded
from gateway.errors import RateLimited


class Charge:
    """A context; it ends with its request's handler."""

    def __init__(self, account: Account, *, generates: bool) -> None:
        """Raises RateLimited."""
        _refuse(account.begin(generates=generates))
        self.account = account
        self._generates = generates
        self._is_open = True

    def __enter__(self) -> "Charge":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def begin_generating(self) -> None:
        """Take a place among those that generate, unless it has one. Raises RateLimited."""
        if not self._generates:
            _refuse(self.account.promote())
            self._generates = True

    def check_debt(self) -> None:
        """Before what costs tokens. Raises RateLimited."""
        _refuse(self.account.in_debt())

    def hold(self, answer_id: str) -> Callable[[], None]:
        """The answer's own place, in place of this request's if that is to generate it. Returns what gives it back."""
        self.account.hold(answer_id)
        if self._generates:
            self.end()
        return partial(self.account.release, answer_id)

    def end(self) -> None:
        """The first call counts."""
        if self._is_open:
            self._is_open = False
            self.account.end(generates=self._generates)


CHARGE = web.RequestKey("charge", Charge)


def _refuse(exceeded: Exceeded | None) -> None:
    if exceeded:
        raise RateLimited(
            exceeded.message, code=f"{exceeded.limit}_exceeded", retry_after_seconds=exceeded.retry_after_seconds
        )
