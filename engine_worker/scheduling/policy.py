"""Who is admitted next and who yields when the KV cache is full. Order only: blocks and budgets are the scheduler's.

First come, first served, all or nothing: the newest running group yields all its blocks and goes to the front of the
waiting queue, so every running group is older than every waiting one, and the oldest always moves on. The exception:
one that was preempted twice is pinned until it got a token further, so that it is not preempted again and again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from engine_worker.scheduling.sequence_group import SequenceGroup


class FirstComeFirstServed:
    def __init__(self) -> None:
        # By request id, in order: O(1) at both ends, and for a cancelled request in the middle.
        self._waiting: OrderedDict[str, SequenceGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._waiting.values())

    def add(self, group: SequenceGroup) -> None:
        """A new request: the last in the queue."""
        self._waiting[group.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        """A preempted group is older than all that wait: the first in the queue."""
        self._waiting[group.request_id] = group
        self._waiting.move_to_end(group.request_id, last=False)

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._waiting.get(request_id)

    def first(self) -> SequenceGroup | None:
        return next(iter(self._waiting.values()), None)

    def pop_first(self) -> SequenceGroup:
        return self._waiting.popitem(last=False)[1]

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        self._waiting.pop(request_id, None)

    def choose_victim(self, running: dict[str, SequenceGroup], needing: SequenceGroup) -> SequenceGroup:
        """Who yields so that `needing` gets a block. `running` is in order of admission: the newest of those after it.

        One that is pinned yields only if all after `needing` are; if there is none, `needing` yields itself.
        """
        newest_first = takewhile(lambda group: group is not needing, reversed(running.values()))
        return next((group for group in newest_first if not group.is_pinned), next(reversed(running.values())))
