"""Who is admitted next and who yields when the KV cache is full. Order only: blocks and budgets are the scheduler's.

Interactive requests before those in the background; within a class first come, first served, all or nothing: the
newest running group yields all its blocks and goes to the front of its class, so every running group is older than
every waiting one of its class, and the oldest always moves on. The exception: one that was preempted twice is pinned
until it got a token further, so that it is not preempted again and again.

It is used in every step, for the scheduler: who is admitted, and who yields. It knows no blocks, budgets or clocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile

from engine_worker.scheduling.sequence_group import SequenceGroup


class FirstComeFirstServed:
    def __init__(self) -> None:
        # By request id, in order: O(1) at both ends, and for a cancelled request in the middle.
        self._interactive: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._background: OrderedDict[str, SequenceGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._interactive) + len(self._background)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return chain(self._interactive.values(), self._background.values())

    @property
    def interactive(self) -> Iterable[SequenceGroup]:
        return self._interactive.values()

    @property
    def num_interactive(self) -> int:
        return len(self._interactive)

    def add(self, group: SequenceGroup) -> None:
        """A new request: the last in the queue of its class."""
        self._queue(group)[group.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        """A preempted group is older than all of its class that wait: the first of them."""
        queue = self._queue(group)
        queue[group.request_id] = group
        queue.move_to_end(group.request_id, last=False)

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._interactive.get(request_id) or self._background.get(request_id)

    def first(self) -> SequenceGroup | None:
        return next(iter(self), None)

    def pop_first(self) -> SequenceGroup:
        return (self._interactive or self._background).popitem(last=False)[1]

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        self._interactive.pop(request_id, None)
        self._background.pop(request_id, None)

    def choose_victim(self, running: dict[str, SequenceGroup], needing: SequenceGroup) -> SequenceGroup:
        """Who yields so that `needing` gets a block. `running` is in order of admission.

        For an interactive one: the newest in the background, whatever its age. Else the newest after it of its class.
        One that is pinned yields only if all those are; if there is none, `needing` yields itself.
        """
        background = [group for group in reversed(running.values()) if group.is_background]
        if needing.is_background:
            newer = list(takewhile(lambda group: group is not needing, background))
            return next((group for group in newer if not group.is_pinned), background[0])
        own = [group for group in reversed(running.values()) if not group.is_background]
        newest_first = [*background, *takewhile(lambda group: group is not needing, own)]
        return next((group for group in newest_first if not group.is_pinned), background[0] if background else own[0])

    def _queue(self, group: SequenceGroup) -> OrderedDict[str, SequenceGroup]:
        return self._background if group.is_background else self._interactive
