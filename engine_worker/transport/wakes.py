"""The wait of one worker for entries in the queue: for a message in its control channel, or in a blocking read.

A blocking read gives an entry to any worker, while a message goes to the one that should take it. Gateways of older
releases send no messages, and their entries show it; so a worker waits for messages from the first one on, until it
reads an entry without.
"""

import asyncio
from collections.abc import Iterable

from shared.redis_scripts import QueueEntry


class Wakes:
    def __init__(self) -> None:
        self.are_sent = False  # whether all gateways seem to send messages
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Record a message."""
        self.are_sent = True
        self._woken.set()

    def begin_look(self) -> None:
        """Forget the messages so far: the caller is about to look at the queue."""
        self._woken.clear()

    def observe(self, entries: Iterable[QueueEntry], new_queues: tuple[str, ...]) -> None:
        """Learn from read entries; only those of `new_queues` are as their gateways wrote them."""
        for entry in entries:
            if entry.queue in new_queues:
                self.are_sent = entry.home is not None

    async def wait(self, seconds: float) -> None:
        """Wait for a message that came after begin_look(), at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
