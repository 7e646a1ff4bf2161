"""Places that batches of several owners share: for lines in flight, and for the batches that a gateway drives.

    FairSlots        of all lines: the owner that holds the fewest comes first
    Room             of one batch's lines, by number and by bytes
    who_gives_way    which batch ends its turn where another owner's waits

A line's way in waits here for its place. It knows owners and places, and nothing of lines.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

RESERVED_SHARE = 8  # one place in so many is for owners that hold none
MAX_BYTES = 4 * 2**20  # of one batch's lines: bodies of 2 MiB are none to have 64 of
TURN_SECONDS = 60.0  # what a batch has for itself while owners without any wait: some hundred lines at least


class FairSlots:
    """Some stay free of those that hold any, however many these are: the first line of another one need not wait for an
    answer to end."""

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


class Room:
    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._num_lines = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """One always may, however large. For one caller at a time."""
        while self._num_lines and (self._num_lines >= self._max_lines or self._num_bytes + num_bytes > MAX_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self._num_lines += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._num_lines -= 1
        self._num_bytes -= num_bytes
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Turn:
    batch_id: str
    owner: str
    began_at: float  # on the clock of `now`


def num_of(owner: str, turns: Sequence[Turn]) -> int:
    return sum(turn.owner == owner for turn in turns)


def who_gives_way(turns: Sequence[Turn], owner: str, now: float) -> Turn | None:
    """To a batch of `owner`, so that in the end all owners have equally many. None: nobody has to, now.

    The latest of who has more than one more than `owner`. Where each has one and `owner` none, the one that has had its
    turn the longest, once that was long enough.
    """
    counts = Counter(turn.owner for turn in turns)
    richest, most = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if most > counts[owner] + 1:
        return max((turn for turn in turns if turn.owner == richest), key=lambda turn: turn.began_at)
    if counts[owner]:
        return None
    oldest = min(turns, key=lambda turn: turn.began_at, default=None)
    return oldest if oldest is not None and now - oldest.began_at >= TURN_SECONDS else None
