"""Places for lines in flight, of all batches of a gateway: of several owners the one that holds the fewest comes first.

Some stay free of those that hold any, however many these are, so the first line of another one need not wait for an
answer to end.

A line's way in waits here for its place. It knows owners and places, and nothing of lines.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

RESERVED_SHARE = 8  # one place in so many is for owners that hold none


class FairSlots:
    def __init__(self, num_slots: int, *, has_owners: bool) -> None:
        """`has_owners`: False where all batches are everybody's, who may have all places."""
        self._num_free = num_slots
        self._num_reserved = max(1, num_slots // RESERVED_SHARE) if has_owners else 0
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        await self._acquire(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _acquire(self, owner: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # both in the same turn of the loop
                self._release(owner)
            raise

    def _release(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self._num_free and (owner := self._next_owner()) is not None:
            place = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if place.cancelled():
                continue
            self._held[owner] += 1
            self._num_free -= 1
            place.set_result(None)

    def _next_owner(self) -> str | None:
        """The next key: of those that hold equally few the one that has waited longest."""
        has_spare = self._num_free > self._num_reserved
        owners = [owner for owner in self._waiting if has_spare or not self._held[owner]]
        return min(owners, key=lambda owner: self._held[owner], default=None)
