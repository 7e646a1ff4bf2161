"""Counts the running slots of each tenant, and ranks tenants by their usage: slots divided by weight.

A tenant is an API key. Slots are divided by preemption, so a single tenant may hold all of them. The two classes are
counted separately, because background requests yield to interactive ones anyway.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str = ""
    weight: float = 1.0  # share relative to other tenants
    max_running: int = 0  # limit of running sequences; 0: no limit


class RunningSlots:
    """The running slots of one scheduler."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_taken = 0
        self._by_class: dict[bool, dict[str, int]] = {False: {}, True: {}}  # by is_background, then by tenant
        self._num_taken_of_class = {False: 0, True: 0}
        self._weights: dict[str, float] = {}  # of tenants that hold slots

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_taken

    @property
    def num_background(self) -> int:
        return self._num_taken_of_class[True]

    @property
    def has_keys(self) -> bool:
        """Whether a tenant with an API key holds slots."""
        return any(self._weights)

    def take(self, tenant: Tenant, num_slots: int, *, is_background: bool) -> None:
        held = self._by_class[is_background]
        held[tenant.name] = held.get(tenant.name, 0) + num_slots
        self._weights[tenant.name] = tenant.weight
        self._num_taken_of_class[is_background] += num_slots
        self.num_taken += num_slots

    def give_back(self, tenant: Tenant, num_slots: int, *, is_background: bool) -> None:
        held = self._by_class[is_background]
        held[tenant.name] -= num_slots
        if not held[tenant.name]:
            del held[tenant.name]
            if not self.held(tenant.name):
                del self._weights[tenant.name]
        self._num_taken_of_class[is_background] -= num_slots
        self.num_taken -= num_slots

    def held(self, name: str) -> int:
        """Return the slots of a tenant in both classes."""
        return self._by_class[False].get(name, 0) + self._by_class[True].get(name, 0)

    def is_at_limit(self, tenant: Tenant, num_slots: int = 1) -> bool:
        """Return whether `num_slots` more would exceed the tenant's limit. One request of a tenant may always run."""
        if not tenant.max_running:
            return False
        held = self.held(tenant.name)
        return held > 0 and held + num_slots > tenant.max_running

    def num_left(self, tenant: Tenant, wanted: int) -> int:
        """Return how many of `wanted` slots the tenant's limit allows, at least one."""
        return wanted if not tenant.max_running else min(wanted, max(1, tenant.max_running - self.held(tenant.name)))

    def usage_with(self, tenant: Tenant, num_slots: int, *, is_background: bool) -> float:
        """Return the usage of `tenant` if it held `num_slots` more."""
        weight = self._weights.get(tenant.name, tenant.weight)
        return (self._by_class[is_background].get(tenant.name, 0) + num_slots) / weight

    def usage_without(self, tenant: Tenant, num_slots: int, *, is_background: bool) -> float:
        """Return the usage of `tenant` if it held `num_slots` fewer."""
        return self.usage_with(tenant, -num_slots, is_background=is_background)

    def highest_usage(self, *, is_background: bool) -> float:
        """Return the usage, without one slot, of the tenant that is furthest above its share."""
        held = self._by_class[is_background]
        return max(((count - 1) / self._weights[name] for name, count in held.items()), default=0.0)

    def check_integrity(self, running: Iterable[tuple[Tenant, int, bool]]) -> None:
        """Raise AssertionError unless the counts match `running`: tenant, slots, is_background."""
        held = {False: Counter[str](), True: Counter[str]()}
        for tenant, num_slots, is_background in running:
            held[is_background][tenant.name] += num_slots
        assert held == self._by_class, f"slots by class and tenant: {held}, counted {self._by_class}"
        assert self.num_taken == sum(count.total() for count in held.values()) <= self.num_slots
