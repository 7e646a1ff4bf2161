"""Slots that batches of several owners share: for lines in flight, and for the batches that a driver runs.

FairSlots        slots of all lines: the owner that holds the fewest is next
Room             limit of one batch's lines, by number and by bytes
batch_to_yield   the batch that ends its time slice for another owner
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

RESERVED_SHARE = 8  # one slot in 8 is reserved for owners that hold none
MAX_BYTES = 4 * 2**20  # bodies in flight per batch; 64 lines of 2 MiB would be too many
TURN_SECONDS = 60.0  # time slice of a batch while owners without one wait: at least some hundred lines


class FairSlots:
    """Slots shared by owners.

    Some are reserved for owners that hold none, so the first line of a new owner does not wait for an answer to end.
    """

    def __init__(self, num_slots: int, *, has_owners: bool) -> None:
        """Create the slots; without API keys (`has_owners` is False) nothing is reserved."""
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
            if place.done() and not place.cancelled():  # granted and cancelled in one iteration of the loop
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
        """Return the waiting owner with the fewest slots; the longest wait breaks ties."""
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
        """Wait for room; one line may always enter, whatever its size. For one caller at a time."""
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
    began_at: float  # monotonic seconds


def num_of(owner: str, turns: Sequence[Turn]) -> int:
    return sum(turn.owner == owner for turn in turns)


def batch_to_yield(turns: Sequence[Turn], owner: str, now: float) -> Turn | None:
    """Return the batch that must yield to a batch of `owner`, or None, so that owners get equal numbers.

    It is the newest batch of the owner with most batches, if that owner has at least two more than `owner`. If each has
    one and `owner` none, it is the oldest batch once its time slice is over.
    """
    counts = Counter(turn.owner for turn in turns)
    largest_owner, num_batches = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if num_batches > counts[owner] + 1:
        return max((turn for turn in turns if turn.owner == largest_owner), key=lambda turn: turn.began_at)
    if counts[owner]:
        return None
    oldest = min(turns, key=lambda turn: turn.began_at, default=None)
    return oldest if oldest is not None and now - oldest.began_at >= TURN_SECONDS else None
