"""What one API key has spent: requests a minute, tokens a minute, requests at once. Pure; the clock is an argument.

Each gateway process counts for itself, so behind N of them a key can spend N times its limits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.auth.api_keys import ApiKey
from shared.redis_keys import PRIORITY_CLASSES


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
        self._clock = clock
        self._num_open = 0
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

    def begin(self) -> Exceeded | None:
        """Count a request, unless a limit forbids it. Each success is followed by one end()."""
        if exceeded := self._exceeded():
            return exceeded
        self._num_open += 1
        if self._requests:
            self._requests.take(1, self._clock())
        return None

    def end(self, num_tokens: int) -> None:
        """`num_tokens`: prompt and output of the request together."""
        self._num_open -= 1
        if self._tokens:
            self._tokens.take(num_tokens, self._clock())

    def _exceeded(self) -> Exceeded | None:
        if self.key is None:
            return None
        now = self._clock()
        if self.key.max_concurrent is not None and self._num_open >= self.key.max_concurrent:
            return Exceeded("max_concurrent", f"{self.key.max_concurrent} requests of this key are open, its limit.", 1)
        if self._requests and (seconds := self._requests.seconds_until(1, now)):
            return Exceeded(
                "requests_per_minute", f"This key may send {self.key.requests_per_minute} requests a minute.", seconds
            )
        if self._tokens and (seconds := self._tokens.seconds_until(1, now)):
            return Exceeded(
                "tokens_per_minute", f"This key may use {self.key.tokens_per_minute} tokens a minute.", seconds
            )
        return None
