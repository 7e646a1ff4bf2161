"""Rate limits of one API key: requests and tokens per minute. Pure; the clock is an argument.

An answer reserves its prompt and its longest output, or what is left in the bucket. Output above the reserve is charged
while the answer runs, and the unused reserve is returned at its end. A key in debt starts nothing new. Each gateway
counts for itself; shared_limits.py adds what the others have spent.
"""

from collections.abc import Callable, Iterable

from gateway.auth.api_keys import ApiKey
from gateway.errors import RateLimited
from shared.redis_keys import PRIORITY_CLASSES

CHARGE_SECONDS = 0.5  # between two charges of running answers' output, which cost 5 us per answer


class TokenBucket:
    """A bucket of at most `per_minute` units, refilled evenly. A negative level is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken; 0: now."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self._per_minute)

    def holds(self, now: float) -> float:
        """Return the units that can be taken without going into debt."""
        self._fill(now)
        return max(0.0, self._level)

    def take(self, amount: float, now: float) -> None:
        """Take units, or give back a negative amount."""
        self._fill(now)
        self._level -= amount

    def set_level(self, level: float, now: float) -> None:
        self._level, self._filled_at = level, now

    def _fill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._filled_at) * self._per_minute / 60)
        self._filled_at = now


class TokenCharge:
    """The tokens charged for one answer: a reserve first, at its end the tokens used."""

    def __init__(self, account: "Account", num_reserved: float, count_used: Callable[[], int]) -> None:
        self._account = account
        self._num_charged = num_reserved
        self._count_used = count_used

    def update(self) -> None:
        """Charge the output above the reserve."""
        if (num_more := self._count_used() - self._num_charged) > 0:
            self._num_charged += num_more
            self._account.spend(num_more)

    def settle(self) -> None:
        """End the charge and return the unused reserve. Call it once."""
        self._account.spend(self._count_used() - self._num_charged)
        self._account.charges.discard(self)


class Account:
    """The spending of one API key; without keys, of all requests together."""

    def __init__(self, key: ApiKey | None, clock: Callable[[], float]) -> None:
        self.key = key
        self.store_ratio = 1.0  # part of the store's memory for its requests; set by Access
        self.has_neighbors = False  # whether other keys exist, which share resources with this one; set by Access
        self._clock = clock
        now = clock()
        self._requests = TokenBucket(key.requests_per_minute, now) if key and key.requests_per_minute else None
        self._tokens = TokenBucket(key.tokens_per_minute, now) if key and key.tokens_per_minute else None
        self.charges = set[TokenCharge]()  # of answers that run
        self._charged_at = now
        self._unshared_tokens = 0.0  # spent since the other gateways were told

    @property
    def is_limited(self) -> bool:
        return self._requests is not None or self._tokens is not None

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    @property
    def weight(self) -> float:
        """The share of this key relative to other keys."""
        return self.key.weight if self.key else 1.0

    @property
    def max_running(self) -> int:
        """The limit of running sequences per worker; 0: no limit."""
        return self.key.max_concurrent or 0 if self.key else 0

    def may_use(self, model_names: Iterable[str]) -> bool:
        """Return whether the key may use a model with these names."""
        allowed = self.key.models if self.key else None
        return allowed is None or any(name in allowed for name in model_names)

    def priority_class(self, requested: str = PRIORITY_CLASSES[0]) -> str:
        """Return the class that a request runs in: the requested one, or the key's highest if that is lower."""
        highest = self.key.highest_priority_class if self.key else PRIORITY_CLASSES[0]
        return max(requested, highest, key=PRIORITY_CLASSES.index)

    @property
    def owner_key_hash(self) -> str:
        """The digest of the key that owns the requests; "" without keys."""
        return self.key.sha256 if self.key else ""

    def begin(self, *, generates: bool) -> None:
        """Count a request.

        Args:
            generates: Whether it produces tokens, which a key in debt may not.

        Raises:
            RateLimited: If the key has used up its requests or tokens.
        """
        if self._requests and self.key and (seconds := self._requests.seconds_until(1, self._clock())):
            raise self.too_many_requests(seconds)
        if generates:
            self.check_debt()
        if self._requests:
            self._requests.take(1, self._clock())

    def check_debt(self) -> None:
        """Raise RateLimited if the key is in debt."""
        if self._tokens is None:
            return
        self._update_charges()
        if seconds := self._tokens.seconds_until(1, self._clock()):
            raise self.too_many_tokens(seconds)

    def _update_charges(self) -> None:
        if self._clock() >= self._charged_at + CHARGE_SECONDS:
            self._charged_at = self._clock()
            for charge in self.charges:
                charge.update()

    def too_many_requests(self, seconds: float) -> RateLimited:
        """Return the error of a key without requests left; it has one again after `seconds`."""
        limit = self.key.requests_per_minute if self.key else None
        message = f"This API key is limited to {limit} requests per minute."
        return RateLimited(message, code="requests_per_minute_exceeded", retry_after_seconds=seconds)

    def too_many_tokens(self, seconds: float) -> RateLimited:
        """Return the error of a key in debt; it has a token again after `seconds`."""
        limit = self.key.tokens_per_minute if self.key else None
        message = f"This API key is limited to {limit} tokens per minute."
        return RateLimited(message, code="tokens_per_minute_exceeded", retry_after_seconds=seconds)

    def reserve(self, num_prompt: int, max_output: int, count_used: Callable[[], int]) -> TokenCharge | None:
        """Reserve the tokens of an answer.

        Args:
            num_prompt: Tokens of its prompts.
            max_output: Tokens that it may produce.
            count_used: Returns the prompt and output tokens that it used so far.

        Returns:
            Its charge, to settle at its end; None if tokens are not limited.

        Raises:
            RateLimited: If the key is in debt.
        """
        self.check_debt()
        if self._tokens is None:
            return None
        self.spend(num_prompt)
        output = min(max_output, self._tokens.holds(self._clock()))
        self.spend(output)
        charge = TokenCharge(self, num_prompt + output, count_used)
        self.charges.add(charge)
        return charge

    def spend(self, num_tokens: float) -> None:
        """Charge tokens, or give back a negative number."""
        if self._tokens:
            self._tokens.take(num_tokens, self._clock())
            self._unshared_tokens += num_tokens

    # -- what other gateways must know, and what they have spent

    def give_back_request(self) -> None:
        """Return a request that begin() counted, and that is refused."""
        if self._requests:
            self._requests.take(-1, self._clock())

    def has_unshared(self) -> bool:
        """Charge what running answers have used, and return whether the other gateways do not know all tokens."""
        self._update_charges()
        return self._unshared_tokens != 0

    def take_unshared(self) -> float:
        """Return the tokens that the others do not know, for telling them."""
        taken, self._unshared_tokens = self._unshared_tokens, 0.0
        return taken

    def return_unshared(self, num_tokens: float) -> None:
        """Keep tokens of take_unshared() for its next call, because telling the others failed."""
        self._unshared_tokens += num_tokens

    def learn(self, tokens_left: float) -> None:
        """Set the tokens that all gateways together have left."""
        if self._tokens:
            self._tokens.set_level(tokens_left - self._unshared_tokens, self._clock())
