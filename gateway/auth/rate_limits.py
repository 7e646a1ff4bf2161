"""Spending of one API key: requests a minute, tokens a minute, requests at once. Pure; the clock is an argument.

Of requests at once there are two counts: answers that are generated, and all other requests (reads, counts, files),
which do not take the places of the first. An answer that goes on without its client keeps its place, which all who read
it at this gateway share: its client can still read it, or cancel it. Each gateway process counts for itself, so behind
N of them a key can spend N times its limits.

A chat's way in, around every route, and once more where tokens are known. It knows no HTTP and no store.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from gateway.auth.api_keys import ApiKey
from gateway.errors import RateLimited
from shared.redis_keys import PRIORITY_CLASSES

MIN_OTHER_PLACES = 8  # of requests that do not generate, however few a key's max_concurrent lets generate


@dataclass(frozen=True)
class Exceeded:
    limit: str  # requests_per_minute | tokens_per_minute | max_concurrent
    message: str
    retry_after_seconds: float


class TokenBucket:
    """`per_minute` units, refilled evenly, never more than a minute's worth. It may go into debt: what a request
    generates is known when it ends."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """0 if `amount` can be taken now."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._filled_at) * self._per_minute / 60)
        self._filled_at = now


class Account:
    """One key's spending; of everybody's together when no key is asked for."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float]) -> None:
        self.key = key
        self.store_ratio = 1.0  # of the store's memory, that its requests may hold; told by whoever knows all keys
        self.has_neighbors = False  # whether other keys are configured, which divide resources with this one
        self._clock = clock
        self._num_open = {True: 0, False: 0}  # by whether they generate
        self._holders = Counter[str]()  # of the places of answers, by their ids
        now = clock()
        self._requests = TokenBucket(key.requests_per_minute, now) if key and key.requests_per_minute else None
        self._tokens = TokenBucket(key.tokens_per_minute, now) if key and key.tokens_per_minute else None

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    def may_use(self, model_names: Iterable[str]) -> bool:
        """A model of these names."""
        allowed = self.key.models if self.key else None
        return allowed is None or any(name in allowed for name in model_names)

    def priority_class(self, asked: str = PRIORITY_CLASSES[0]) -> str:
        """The class that a request runs in: the one it asks for, or the key's highest if that is lower."""
        highest = self.key.highest_priority_class if self.key else PRIORITY_CLASSES[0]
        return max(asked, highest, key=PRIORITY_CLASSES.index)

    @property
    def owner_key_hash(self) -> str:
        """Whose requests these are; without keys they are everybody's."""
        return self.key.sha256 if self.key else ""

    def begin(self, *, generates: bool) -> Exceeded | None:
        """Count a request, unless a limit forbids it. Each success is followed by one end()."""
        exceeded = self._no_place(generates=generates) or self._too_many() or (self.in_debt() if generates else None)
        if exceeded:
            return exceeded
        self._num_open[generates] += 1
        if self._requests:
            self._requests.take(1, self._clock())
        return None

    def promote(self) -> Exceeded | None:
        """Count a request that did not generate as one that does, unless a limit forbids it."""
        if exceeded := self._no_place(generates=True) or self.in_debt():
            return exceeded
        self._num_open[False] -= 1
        self._num_open[True] += 1
        return None

    def spend(self, num_tokens: int) -> None:
        """`num_tokens`: prompt and output of a request together."""
        if self._tokens:
            self._tokens.take(num_tokens, self._clock())

    def end(self, *, generates: bool) -> None:
        self._num_open[generates] -= 1

    def hold(self, answer_id: str) -> None:
        """Its place among those that generate is there until each who holds it has released it. Never refused."""
        if not self._holders[answer_id]:
            self._num_open[True] += 1
        self._holders[answer_id] += 1

    def release(self, answer_id: str) -> None:
        self._holders[answer_id] -= 1
        if not self._holders[answer_id]:
            del self._holders[answer_id]
            self._num_open[True] -= 1

    def in_debt(self) -> Exceeded | None:
        """Whether tokens are owed: then nothing that costs any is begun."""
        if self._tokens and self.key and (seconds := self._tokens.seconds_until(1, self._clock())):
            return Exceeded(
                "tokens_per_minute", f"This key may use {self.key.tokens_per_minute} tokens a minute.", seconds
            )
        return None

    def _no_place(self, *, generates: bool) -> Exceeded | None:
        if self.key is None or self.key.max_concurrent is None:
            return None
        most = self.key.max_concurrent if generates else max(MIN_OTHER_PLACES, self.key.max_concurrent)
        if self._num_open[generates] < most:
            return None
        return Exceeded("max_concurrent", f"{most} requests of this key are open, its limit.", 1)

    def _too_many(self) -> Exceeded | None:
        if self._requests and self.key and (seconds := self._requests.seconds_until(1, self._clock())):
            return Exceeded(
                "requests_per_minute", f"This key may send {self.key.requests_per_minute} requests a minute.", seconds
            )
        return None


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


def _refuse(exceeded: Exceeded | None) -> None:
    if exceeded:
        raise RateLimited(
            exceeded.message, code=f"{exceeded.limit}_exceeded", retry_after_seconds=exceeded.retry_after_seconds
        )
