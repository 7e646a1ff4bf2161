"""A resource of this gateway that API keys divide: open streams, bytes in memory.

Units that a key holds cannot be preempted, so each key is limited by the dynamic threshold of `shared/shares.py`. With
one key or none, the whole resource may be taken. Use it only in the event loop.
"""

from collections import Counter
from collections.abc import Callable
from types import TracebackType

from gateway.auth.rate_limits import Account
from gateway.errors import KeyShareExceeded, Unavailable
from shared.shares import ALPHA, may_take


class DividedResource:
    """Counts what each key holds of `total` units."""

    def __init__(self, name: str, setting: str, total: int, make_full_error: Callable[[], Unavailable]) -> None:
        """Name the resource for its refusals.

        Args:
            name: What is divided, in the plural, such as "open streams".
            setting: The flag that sets `total`.
            total: Units of all keys together.
            make_full_error: Returns the error of a request that finds no free units.
        """
        self.total = total
        self.num_held = 0
        self._name = name
        self._setting = setting
        self._make_full_error = make_full_error
        self._held_by_key = Counter[str]()

    def take(self, account: Account, amount: int) -> None:
        """Count `amount` units as held by the account's key.

        Raises:
            KeyShareExceeded: If the key would hold more than its share.
            Unavailable: If all keys together would hold more than `total`.
        """
        key, free = account.owner_key_hash, self.total - self.num_held
        held = self._held_by_key[key]
        is_refused = account.has_neighbors and not may_take(held, amount, free, account.weight)
        if is_refused and (held or amount <= free):
            raise KeyShareExceeded(self._name, f"{int(ALPHA * account.weight * free)} of {self.total}", self._setting)
        if amount > free:
            raise self._make_full_error()
        self.num_held += amount
        self._held_by_key[key] = held + amount

    def give_back(self, key: str, amount: int) -> None:
        """Release units that `take()` counted for this key (`Account.owner_key_hash`)."""
        self.num_held -= amount
        self._held_by_key[key] -= amount
        if not self._held_by_key[key]:
            del self._held_by_key[key]

    def hold(self, account: Account, amount: int) -> "HeldUnits":
        """Take `amount` units and give them back when the context ends. Raises as `take()` does."""
        self.take(account, amount)
        return HeldUnits(self, account.owner_key_hash, amount)


class HeldUnits:
    """Units that are given back at the end of a `with` block."""

    __slots__ = ("_amount", "_key", "_resource")

    def __init__(self, resource: DividedResource, key: str, amount: int) -> None:
        self._resource = resource
        self._key = key
        self._amount = amount

    def shrink(self, amount: int) -> None:
        """Give back all but `amount`."""
        if amount < self._amount:
            self._resource.give_back(self._key, self._amount - amount)
            self._amount = amount

    def __enter__(self) -> "HeldUnits":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resource.give_back(self._key, self._amount)
