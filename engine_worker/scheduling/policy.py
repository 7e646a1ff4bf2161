"""The order of waiting groups, and which running group yields. Order only: the scheduler applies blocks and budgets.

Interactive requests go before background ones. Within a class, tenants share the running slots: the tenant with the
fewest slots for its weight is next; within a tenant, first come, first served. So with one tenant, every running group
is older than every waiting one.

If blocks are missing, the newest group of the tenant furthest above its share yields, and goes to the front of its
tenant's queue. A sequence that was preempted twice is pinned until it gets one more token, so that it makes progress.
If a tenant waits below its share, a group of the tenant furthest above its share yields (`choose_for_share`).

Source: start-time fair queueing, as in the store (shared/redis_scripts/order.lua).
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, count, islice

from engine_worker.scheduling.running_slots import RunningSlots
from engine_worker.scheduling.sequence_group import SequenceGroup

_Queue = OrderedDict[str, SequenceGroup]  # by request id: O(1) at both ends and for a cancelled request in the middle


class FairShare:
    """The queues of waiting groups, by class and tenant."""

    def __init__(self, slots: RunningSlots) -> None:
        self._slots = slots
        self._queues: dict[bool, dict[str, _Queue]] = {False: {}, True: {}}  # by is_background, then by tenant
        self._num_waiting = {False: 0, True: 0}
        self._arrivals = count()

    def __len__(self) -> int:
        return sum(self._num_waiting.values())

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Yield all waiting groups, interactive ones first; in order within each tenant."""
        return chain(self.waiting(is_background=False), self.waiting(is_background=True))

    @property
    def num_interactive(self) -> int:
        return self._num_waiting[False]

    def waiting(self, *, is_background: bool) -> Iterator[SequenceGroup]:
        """Yield the waiting groups of a class, tenant by tenant."""
        for queue in self._queues[is_background].values():
            yield from queue.values()

    def waiting_tenants(self, *, is_background: bool) -> set[str]:
        """Return the names of the tenants that wait."""
        return set(self._queues[is_background])

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request after the others of its class and tenant."""
        group.arrival = next(self._arrivals)
        self._queue(group)[group.request_id] = group
        self._num_waiting[group.is_background] += 1

    def put_back(self, group: SequenceGroup) -> None:
        """Queue a preempted group before the others of its class and tenant."""
        queue = self._queue(group)
        queue[group.request_id] = group
        queue.move_to_end(group.request_id, last=False)
        self._num_waiting[group.is_background] += 1

    def get(self, request_id: str) -> SequenceGroup | None:
        for queues in self._queues.values():
            for queue in queues.values():
                if (group := queue.get(request_id)) is not None:
                    return group
        return None

    def remove(self, group: SequenceGroup) -> None:
        """Take a waiting group out of its queue."""
        queues, name = self._queues[group.is_background], group.tenant.name
        del queues[name][group.request_id]
        if not queues[name]:
            del queues[name]
        self._num_waiting[group.is_background] -= 1

    def candidates(self, *, is_background: bool) -> Iterator[SequenceGroup]:
        """Yield the groups to admit, best first, without those of tenants at their own limit.

        Call it again after each admission, which changes the order.
        """
        for head in self.heads(is_background=is_background):
            yield from self._queues[is_background][head.tenant.name].values()

    def heads(self, *, is_background: bool) -> list[SequenceGroup]:
        """Return the first group of each tenant below its own limit, best first."""
        heads = [next(iter(queue.values())) for queue in self._queues[is_background].values()]
        heads = [head for head in heads if not self._slots.is_at_limit(head.tenant, head.num_slots_to_start)]
        if len(heads) > 1:
            heads.sort(key=lambda head: (self._usage_with(head), head.arrival))
        return heads

    def ready(self, *, is_background: bool) -> Iterator[SequenceGroup]:
        """Yield the waiting groups that the limits of their tenants allow to run."""
        for head in self.heads(is_background=is_background):
            yield from islice(self._queues[is_background][head.tenant.name].values(), self.num_ready_of(head))

    def num_ready(self, *, is_background: bool) -> int:
        """Return how many waiting groups the limits of their tenants allow to run."""
        return sum(map(self.num_ready_of, self.heads(is_background=is_background)))

    def num_ready_of(self, head: SequenceGroup) -> int:
        """Return how many waiting groups of the tenant of `head` its limit allows to run."""
        return self._slots.num_left(head.tenant, len(self._queues[head.is_background][head.tenant.name]))

    def choose_victim(self, running: dict[str, SequenceGroup], needing: SequenceGroup) -> SequenceGroup:
        """Return the group that yields so that `needing` gets a block. `running` is in order of admission.

        A pinned group yields only if all candidates are pinned. Without candidates `needing` itself yields.
        """
        unpinned = (group for group in self._victims(running, needing) if not group.is_pinned)
        return next(unpinned, None) or next(self._victims(running, needing), needing)

    def choose_for_share(
        self, running: dict[str, SequenceGroup], waiting: SequenceGroup, num_slots: int = 1
    ) -> SequenceGroup | None:
        """Return the newest group whose tenant keeps at least the usage that the tenant of `waiting` would reach.

        Args:
            running: Groups in order of admission.
            waiting: A group of a tenant below its share.
            num_slots: The slots that the tenant of `waiting` would take.

        Returns:
            None if no group may yield.
        """
        is_background = waiting.is_background
        wanted = self._slots.usage_with(waiting.tenant, num_slots, is_background=is_background)
        if self._slots.highest_usage(is_background=is_background) < wanted:
            return None
        victims = [
            (self._usage_without(group), place, group)
            for place, group in enumerate(running.values())
            if group.is_background is is_background and not group.is_pinned and group.tenant.name != waiting.tenant.name
        ]
        usage, _, victim = max(victims, key=lambda victim: victim[:2], default=(-1.0, 0, None))
        return victim if usage >= wanted else None

    def _victims(self, running: dict[str, SequenceGroup], needing: SequenceGroup) -> Iterator[SequenceGroup]:
        """Yield groups of the tenants furthest above their share: background ones first, then the newest first.

        If `needing` belongs to such a tenant, only newer groups yield to it.
        """
        for is_background in (True,) if needing.is_background else (True, False):
            highest = self._slots.highest_usage(is_background=is_background)
            for group in reversed(running.values()):
                if group.is_background is not is_background:
                    continue
                is_furthest = self._kept(group) >= highest
                if group is needing and is_furthest:
                    break
                if is_furthest:
                    yield group

    def _kept(self, group: SequenceGroup) -> float:
        """Return the usage of the group's tenant without one slot."""
        return self._slots.usage_without(group.tenant, 1, is_background=group.is_background)

    def _usage_with(self, group: SequenceGroup) -> float:
        slots = group.num_slots_to_start
        return self._slots.usage_with(group.tenant, slots, is_background=group.is_background)

    def _usage_without(self, group: SequenceGroup) -> float:
        slots = group.num_slots_to_start
        return self._slots.usage_without(group.tenant, slots, is_background=group.is_background)

    def _queue(self, group: SequenceGroup) -> _Queue:
        return self._queues[group.is_background].setdefault(group.tenant.name, _Queue())
