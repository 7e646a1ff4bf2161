"""Who is admitted next and who yields. Order only: blocks, budgets and limits of a step are the scheduler's.

Interactive requests go before those in the background. Within a class tenants share the running slots: the tenant with
the fewest slots for its weight is next, and first come, first served holds within a tenant. So with one tenant every
running group is older than every waiting one.

When blocks are missing, the newest group of the tenant furthest above its share yields, and goes to the front of its
tenant's queue. A sequence that was preempted twice is pinned until it got a token further, so that it is not preempted
again and again. When a tenant waits below its share, a group of the tenant furthest above yields too
(`choose_for_share`).

Source: start-time fair queueing orders the same tenants in the store (shared/redis_scripts/order.lua).
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, count, islice

from engine_worker.scheduling.running_slots import RunningSlots
from engine_worker.scheduling.sequence_group import SequenceGroup

_Queue = OrderedDict[str, SequenceGroup]  # by request id: O(1) at both ends, and for a cancelled request in the middle


class FairShare:
    def __init__(self, slots: RunningSlots) -> None:
        self._slots = slots
        self._queues: dict[bool, dict[str, _Queue]] = {False: {}, True: {}}  # by whether it is background: by tenant
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
        """Queue a group that ran: before the others of its class and tenant."""
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

        To be asked again after each admission, which changes the order.
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
        """Yield the waiting groups that no limit of their tenant keeps from running."""
        for head in self.heads(is_background=is_background):
            yield from islice(self._queues[is_background][head.tenant.name].values(), self.num_ready_of(head))

    def num_ready(self, *, is_background: bool) -> int:
        """Return how many groups wait that no limit of their tenant keeps from running."""
        return sum(map(self.num_ready_of, self.heads(is_background=is_background)))

    def num_ready_of(self, head: SequenceGroup) -> int:
        """Return how many groups of the tenant of `head` wait that its limit does not keep from running."""
        return self._slots.num_left(head.tenant, len(self._queues[head.is_background][head.tenant.name]))

    def choose_victim(self, running: dict[str, SequenceGroup], needing: SequenceGroup) -> SequenceGroup:
        """Return the group that yields so that `needing` gets a block. `running` is in order of admission.

        One that is pinned yields only if all that may are; if none may, `needing` yields itself.
        """
        unpinned = (group for group in self._victims(running, needing) if not group.is_pinned)
        return next(unpinned, None) or next(self._victims(running, needing), needing)

    def choose_for_share(
        self, running: dict[str, SequenceGroup], waiting: SequenceGroup, num_slots: int = 1
    ) -> SequenceGroup | None:
        """Return the newest group whose tenant, without it, still has as much as that of `waiting` with `num_slots`."""
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
        """Yield the groups of the tenants furthest above their share, those in the background first, the newest first.

        Only newer ones yield to a group of such a tenant.
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
        """Return the usage of its tenant without one slot."""
        return self._slots.usage_without(group.tenant, 1, is_background=group.is_background)

    def _usage_with(self, group: SequenceGroup) -> float:
        slots = group.num_slots_to_start
        return self._slots.usage_with(group.tenant, slots, is_background=group.is_background)

    def _usage_without(self, group: SequenceGroup) -> float:
        slots = group.num_slots_to_start
        return self._slots.usage_without(group.tenant, slots, is_background=group.is_background)

    def _queue(self, group: SequenceGroup) -> _Queue:
        return self._queues[group.is_background].setdefault(group.tenant.name, _Queue())
