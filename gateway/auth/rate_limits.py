"""The spending of one API key: requests and tokens per minute. Pure; the clock is an argument.

An answer reserves its prompt and its longest output, as far as the bucket holds that. What it produces above that is
charged while it runs, and what it did not use is given back at its end. A key in debt starts nothing new. Each gateway
process counts for itself: across N of them a key can spend N times its limits.
"""

from collections.abc import Callable, Iterable

from gateway.auth.api_keys import ApiKey
from gateway.errors import RateLimited
from shared.redis_keys import PRIORITY_CLASSES

CHARGE_SECONDS = 0.5  # between two charges of what running answers produce: 5 us per answer


class TokenBucket:
    """`per_minute` units, refilled evenly, never more than a minute's worth. Its level falls below 0 in debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """0 if `amount` can be taken now."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def holds(self, now: float) -> float:
        """Return the units that can be taken without a debt."""
        self._fill(now)
        return max(0.0, self._level)

    def take(self, amount: float, now: float) -> None:
        """Take units, or give back a negative amount."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._filled_at) * self._per_minute / 60)
        self._filled_at = now


class TokenCharge:
    """The tokens that one answer is charged: a reserve first, at its end what it used."""

    def __init__(self, account: "Account", num_reserved: float, count_used: Callable[[], int]) -> None:
        self._account = account
        self._num_charged = num_reserved
        self._count_used = count_used

    def update(self) -> None:
        """Charge what was produced above the reserve."""
        if (num_more := self._count_used() - self._num_charged) > 0:
            self._num_charged += num_more
            self._account.spend(num_more)

    def settle(self) -> None:
        """End the charge, once: give back the reserve that was not used."""
        self._account.spend(self._count_used() - self._num_charged)
        self._account.charges.discard(self)


class Account:
    """One key's spending; of everybody's together when no key is asked for."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float]) -> None:
        self.key = key
        self.store_ratio = 1.0  # of the store's memory, that its requests may hold; told by whoever knows all keys
        self.has_neighbors = False  # whether other keys are configured, which divide resources with this one
        self._clock = clock
        now = clock()
        self._requests = TokenBucket(key.requests_per_minute, now) if key and key.requests_per_minute else None
        self._tokens = TokenBucket(key.tokens_per_minute, now) if key and key.tokens_per_minute else None
        self.charges = set[TokenCharge]()  # of answers that run
        self._charged_at = now

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    @property
    def weight(self) -> float:
        """The share of this key relative to other keys."""
        return self.key.weight if self.key else 1.0

    @property
    def max_running(self) -> int:
        """The number of sequences that may run at one time on a worker; 0 = no limit."""
        return self.key.max_concurrent or 0 if self.key else 0

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

    def begin(self, *, generates: bool) -> None:
        """Count a request. Raises RateLimited if a limit forbids it."""
        if self._requests and self.key and (seconds := self._requests.seconds_until(1, self._clock())):
            message = f"This key may send {self.key.requests_per_minute} requests a minute."
            raise RateLimited(message, code="requests_per_minute_exceeded", retry_after_seconds=seconds)
        if generates:
            self.check_debt()
        if self._requests:
            self._requests.take(1, self._clock())

    def check_debt(self) -> None:
        """Raises RateLimited if tokens are owed: then nothing that costs any is begun."""
        if self._tokens is None or self.key is None:
            return
        if self._clock() >= self._charged_at + CHARGE_SECONDS:
            self._charged_at = self._clock()
            for charge in self.charges:
                charge.update()
        if seconds := self._tokens.seconds_until(1, self._clock()):
            message = f"This key may use {self.key.tokens_per_minute} tokens a minute."
            raise RateLimited(message, code="tokens_per_minute_exceeded", retry_after_seconds=seconds)

    def reserve(self, num_prompt: int, max_output: int, count_used: Callable[[], int]) -> TokenCharge | None:
        """Reserve the tokens of an answer.

        Args:
            num_prompt: Tokens of its prompts.
            max_output: Tokens that it may produce.
            count_used: Returns the prompt and output tokens that it used so far.

        Returns:
            Its charge, to be settled at its end; None without a limit of tokens.

        Raises:
            RateLimited: If the key is in debt.
        """
        self.check_debt()
        if self._tokens is None:
            return None
        self._tokens.take(num_prompt, self._clock())
        output = min(max_output, self._tokens.holds(self._clock()))
        self._tokens.take(output, self._clock())
        charge = TokenCharge(self, num_prompt + output, count_used)
        self.charges.add(charge)
        return charge

    def spend(self, num_tokens: float) -> None:
        """Charge tokens, or give back a negative number."""
        if self._tokens:
            self._tokens.take(num_tokens, self._clock())
