"""The wait of one worker for entries in the queue: for a message in its control channel, or in a blocking read.

A blocking read gives an entry to any worker and costs the store time for every waiting one, while a message goes to the
worker that should take the entry. A worker without peers needs no messages. Gateways of older releases send none, and
their entries show it; so a worker waits for messages from the first one on, until it reads an entry without.
"""

import asyncio
from collections.abc import Callable, Iterable

from shared.redis_scripts import QueueEntry


class Wakes:
    def __init__(self, has_peers: Callable[[], bool] = lambda: True) -> None:
        """`has_peers`: whether other workers read this queue."""
        self._has_peers = has_peers
        self._are_sent = False
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Record a message."""
        self._are_sent = True
        self._woken.set()

    @property
    def are_sent(self) -> bool:
        """Whether a message precedes each entry for this worker."""
        return self._are_sent and self._has_peers()

    def begin_look(self) -> None:
        """Forget the messages so far: the caller is about to look at the queue."""
        self._woken.clear()

    def observe(self, entries: Iterable[QueueEntry], new_queues: tuple[str, ...]) -> None:
        """Learn from read entries; only those of `new_queues` are as their gateways wrote them."""
        for entry in entries:
            if entry.queue in new_queues:
                self._are_sent = entry.home is not None

    async def wait(self, seconds: float) -> None:
        """Wait for a message that came after begin_look(), at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
